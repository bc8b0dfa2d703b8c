"""Decisions that a configuration leaves open, each with its reason.

    engine: auto         vLLM if it is installed, there is a GPU, and it can serve the model; else embedded
    learner: auto        torch, which trains packs; Unsloth is used if it is named
    model.dtype: auto    the dtype that the run was trained in so far; else what the learner's device computes well
    train.learning_rate: auto   the rate that the run had so far; else by the model's width (learners/learning_rate.py)
    learner.gradient_checkpointing: auto, model.max_length: null   by the memory of the GPU (gpu_fit.py)

    Machine -> engine_facts, learner_facts -> choose -> AutoChoice

One place decides for every command. `choose` is a pure function of facts, so that a run that is resumed on the same
machine continues as it was. Nothing heavy is imported here; vLLM is tried in a process of its own.
"""

import json
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.compose import LoadedConfig
from art_cli.config.overrides import variants
from art_cli.config.schema import (
    ModelConfig,
    RunConfig,
    Section,
)
from art_cli.engines import engine_traits
from art_cli.engines.vllm.arguments import (
    LORA_RANKS,
    ONLY_16_BITS,
    VllmFacts,
    find_vllm,
    has_gpu,
    own_server,
    own_share,
    visible_gpus,
)
from art_cli.learners.learning_rate import choose_rate
from art_cli.loop.gpu_fit import context, gpu_use
from art_cli.models.loading import context_at, resolve_dtype, width_of
from art_cli.models.precision import gpu_bytes
from art_cli.models.run_memory import GIB, ModelSize, checkpoint_from, model_size
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)

NAMES = {
    "engine": ("vllm", "embedded"),
    "learner": ("unsloth", "torch"),
}  # (the faster one, the one that runs anywhere)
HUB_TIMEOUT_S = 10.0


class Facts(NamedTuple):
    """The facts behind a choice. Example: Facts(True, found="vLLM 0.32.0"), or Facts(True, problem="no vLLM here")."""

    has_gpu: bool
    obstacle: str = ""  # why the faster one does not fit this run; "": nothing is known against it
    found: str = ""  # name and version of the faster one, if it works here
    problem: str = ""  # why the faster one does not work here
    is_installed: bool = False  # True: the faster one is installed, and nevertheless has the problem
    cure: str = ""  # command or advice that solves the problem


class AutoChoice(NamedTuple):
    """Example: AutoChoice("embedded", "vLLM is not installed", "pip install 'art-cli[vllm]'")."""

    name: str
    reason: str
    cure: str = ""  # advice for getting the faster one; "": nothing helps, or nothing is needed


def choose(group: str, facts: Facts) -> AutoChoice:
    """Returns the engine or learner, by `group`, that follows from the facts."""
    fast, plain = NAMES[group]
    if not facts.has_gpu:
        return AutoChoice(plain, "no GPU here")
    if facts.obstacle:
        return AutoChoice(plain, facts.obstacle)
    if facts.problem:
        return AutoChoice(plain, facts.problem, facts.cure)
    return AutoChoice(fast, f"{facts.found} and a GPU are here")


# --- the facts --------------------------------------------------------------------------------------------------------


class Machine:
    """Hardware and packages of this machine; each method looks when it is called."""

    def has_gpu(self) -> bool:
        return has_gpu(os.environ)

    def num_gpus(self) -> int:
        return len(visible_gpus(os.environ)) if self.has_gpu() else 0

    def has(self, module: str) -> bool:
        """Returns True if this Python has the module; it is not imported."""
        return find_spec(module) is not None

    def gpu_bytes(self, device: str) -> float:
        """Returns the whole memory of a GPU, whatever is free of it, or 0 without one."""
        return gpu_bytes(device)

    def vllm(self, python: Path | None) -> VllmFacts:
        """Returns the facts about the vLLM of that Python, after seconds to a minute: it imports vLLM."""
        return find_vllm(python)


def engine_facts(
    machine: Machine,
    *,
    obstacle: str = "",
    base: str | None = None,
    python: Path | None = None,
    quantize: str | None = None,
) -> Facts:
    """Returns the facts for and against vLLM in `python`, or in this Python, as the server of `base` so quantized.

    vLLM is imported only if nothing else decides.
    """
    if not machine.has_gpu() or obstacle:
        return Facts(machine.has_gpu(), obstacle)
    cure = "pip install 'art-cli[vllm]'"
    if python is None and not machine.has("vllm"):
        return Facts(True, problem="vLLM is not installed", cure=cure)
    vllm = machine.vllm(python)
    if vllm.version is None:
        return Facts(True, problem=f"vLLM does not work in {vllm.python}: {vllm.error}", is_installed=True, cure=cure)
    if not vllm.gpus:
        problem = f"torch {vllm.torch} of {vllm.python} sees no GPU"
        return Facts(True, problem=problem, is_installed=True, cure="install a build of torch for this GPU")
    if not vllm.has_bfloat16:
        return Facts(True, f"the GPU has no bfloat16, and {ONLY_16_BITS}")
    if problem := vllm.lacks(quantize):
        return Facts(True, problem=problem, is_installed=True, cure=vllm.plugin_cure)
    if unknown := [name for name in _architectures(base) if name not in vllm.architectures]:
        return Facts(True, f"vLLM {vllm.version} does not serve {unknown[0]}")
    return Facts(True, found=f"vLLM {vllm.version}")


def vllm_obstacle(model: ModelConfig, directory: Path) -> str:
    """Returns the reason why vLLM could not follow the training of this model, or "" if none is known."""
    if model.lora is None:
        return "model.lora is null, and vLLM swaps LoRA adapters only"
    if model.lora.rank > LORA_RANKS[-1]:
        return f"model.lora.rank is {model.lora.rank}, and vLLM serves {LORA_RANKS[-1]} at most"
    if model.dtype == "float32":
        return f"model.dtype is float32, and {ONLY_16_BITS}"
    if is_built(model.base, directory):
        return "model.base is made by a function, and vLLM knows published architectures only"
    return ""


def is_built(base: str, directory: Path) -> bool:
    """Returns True if `model.base` is "file.py:function"."""
    return ":" in base and not (directory / base).is_dir()


def _architectures(base: str | None) -> list[str]:
    """Returns the architectures in the base's config.json, such as ["Qwen3ForCausalLM"]; [] if it cannot be read."""
    found = None if base is None else _base_config(base)
    names = found.get("architectures") if isinstance(found, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _base_config(base: str) -> Any:
    """Returns config.json of a directory or a hub id, from the hub's cache or by one short request."""
    import huggingface_hub

    file = Path(base) / "config.json"
    try:
        cached = file if Path(base).is_dir() else huggingface_hub.try_to_load_from_cache(base, "config.json")
        if isinstance(cached, str | Path):
            return json.loads(Path(cached).read_text())
        return huggingface_hub.HfApi().model_info(base, timeout=HUB_TIMEOUT_S).config
    except Exception as error:  # the boundary to the hub's client; loading the model will raise what is wrong with it
        log.debug("%s: its architecture is not known: %s", base, error)
        return None


def learner_facts(machine: Machine) -> Facts:
    """Returns the facts against Unsloth: on a GPU its attention takes no packs, so it trains one row at a time.

    Remove the obstacle when `benchmarks/gpu` has measured that its kernels gain more than packs do.
    """
    return Facts(machine.has_gpu(), obstacle="it trains packs, and Unsloth one row at a time")


# --- a configuration --------------------------------------------------------------------------------------------------


def resolve_auto(
    loaded: LoadedConfig, *groups: str, machine: Machine | None = None, is_logged: bool = True
) -> LoadedConfig:
    """Returns the configuration with a name in place of each `auto` of the groups; the reasons are kept beside it.

    They are logged unless the caller does so itself. A group that has a name keeps it.
    Example: resolve_auto(load_config("config.yaml"), "engine", "learner").
    """
    config, machine = loaded.config, machine or Machine()
    choices: dict[str, AutoChoice] = {}
    if "engine" in groups and config.engine.name == "auto":
        obstacle = vllm_obstacle(config.model, loaded.directory)
        choices["engine"] = choose(
            "engine", engine_facts(machine, obstacle=obstacle, base=_base(loaded), quantize=config.model.quantize)
        )
    if "learner" in groups and config.learner.name == "auto":
        choices["learner"] = choose("learner", learner_facts(machine))
    if not choices:
        return loaded
    sections = {group: _section(group, choice.name, getattr(config, group)) for group, choice in choices.items()}
    resolved = replace(
        loaded,
        config=config.model_copy(update=sections),
        auto={**loaded.auto} | {group: choice.reason for group, choice in choices.items()},
    )
    if is_logged:
        log.info("%s", describe(resolved, *groups))
    return resolved


def describe(resolved: LoadedConfig, *groups: str) -> str:
    """Example: "engine embedded (auto: no GPU here), learner torch"."""
    parts = []
    for group in groups:
        reason = resolved.auto.get(group)
        section = getattr(resolved.config, group)
        name = section.title if group == "engine" else section.name
        parts.append(f"{group} {name}" + (f" (auto: {reason})" if reason else ""))
    return ", ".join(parts)


def _section(group: str, name: str, auto: Section) -> Section:
    """Returns the section of that name, with the values that were set for `auto`."""
    return _variant(group, name).model_validate({**auto.model_dump(exclude_unset=True), "name": name})


def _variant(group: str, name: str) -> type[Section]:
    variant = variants(RunConfig, group)[name]
    assert issubclass(variant, Section)
    return variant


def _base(loaded: LoadedConfig) -> str:
    local = loaded.directory / loaded.config.model.base
    return str(local) if local.is_dir() else loaded.config.model.base


# --- dtype and learning rate, by the base model -----------------------------------------------------------------------
#
# config.json and the manifests of checkpoints record what was decided, and resuming, evaluating, serving and exporting
# follow it, so that a policy keeps its dtype on a machine where auto would be another one.


def follow_record(loaded: LoadedConfig, run: RunDir) -> LoadedConfig:
    """Returns the configuration with the dtype and the context that the run was trained in so far, where it leaves them
    open and the run has a record of them."""
    if not run.checkpoint_steps():
        return loaded
    return _follow_length(_follow_dtype(loaded, run), run)


def _follow_length(loaded: LoadedConfig, run: RunDir) -> LoadedConfig:
    """A number is followed only if art chose it, because a user's own is a part of the configuration."""
    try:
        record = run_config(run)
    except DataError:
        return loaded  # check_record refuses the damaged config.json
    model, reasons = record.get("model"), record.get("auto")
    length = model.get("max_length") if isinstance(model, dict) else None
    reason = reasons.get("max_length") if isinstance(reasons, dict) else None
    if loaded.config.model.max_length is not None or not isinstance(length, int) or reason is None:
        return loaded
    return _with_length(loaded, length, str(reason))


def _follow_dtype(loaded: LoadedConfig, run: RunDir) -> LoadedConfig:
    if loaded.config.model.dtype != "auto":
        return loaded
    newest = run.newest_checkpoint()
    try:
        recorded = (newest[1].dtype if newest is not None else "") or recorded_dtype(run)
        reasons = run_config(run).get("auto")
    except DataError:
        return loaded  # check_record refuses the damaged config.json
    reason = reasons.get("dtype") if isinstance(reasons, dict) else None
    return _with_dtype(loaded, recorded, str(reason or f"as in {run.root}")) if recorded else loaded


def recorded_dtype(run: RunDir | None) -> str:
    """Returns the dtype in the run's config.json, or "" if it has none or an older version left it open."""
    dtype = run_config(run).get("model", {}).get("dtype", "auto")
    return "" if dtype == "auto" else str(dtype)


def decide_by_base(
    loaded: LoadedConfig, base: str, *, recorded: str = "", is_begun: bool = False, machine: Machine | None = None
) -> LoadedConfig:
    """Returns the configuration with everything decided that it leaves open; `recorded` is a dtype.

    A run that `is_begun` keeps the context that it has so far, also where that is null.
    Raises UsageError if nothing loadable is at `base`.
    """
    loaded = _decide_dtype(loaded, base, recorded)
    if loaded.config.train.learning_rate == "auto":
        loaded = with_rate(loaded, *choose_rate(width_of(base), loaded.config.model.lora))
    return _decide_memory(loaded, base, machine or Machine(), is_begun=is_begun)


def _decide_memory(loaded: LoadedConfig, base: str, machine: Machine, *, is_begun: bool) -> LoadedConfig:
    """Returns the configuration with what follows from the memory of a GPU: checkpointing, the context, and the share
    of a vLLM that samples while the learner works on the same GPU. All of the GPU's memory counts, not what is free."""
    if (sized := read_sizes(loaded.config, base, machine)) is None:
        return _with_checkpointing(loaded, False, "")
    use = gpu_use(loaded.config, *sized, os.environ)
    gpu = f"a GPU of {use.total / GIB:.1f} GiB"
    loaded = _with_checkpointing(
        loaded, checkpoint_from(use.total, use.learner), f"what a token keeps there, and {gpu}"
    )
    engine = own_server(loaded.config.engine)
    if use.learner.is_beside and engine is not None and own_share(engine) is None:
        args = {**engine.args, "gpu-memory-utilization": use.share}
        log.info("vLLM gets %.3f of %s (auto: the learner works at the same time)", use.share, gpu)
        loaded = _with(loaded, engine=engine.model_copy(update={"args": args}))
    if is_begun or loaded.config.model.max_length is not None:
        return loaded
    if (length := context(use, context_at(base))) is None:
        return loaded
    reason = f"what vLLM's cache holds on {gpu}"
    log.info("model.max_length %d (auto: %s)", length, reason)
    return _with_length(loaded, length, reason)


def read_sizes(config: RunConfig, base: str, machine: Machine) -> tuple[ModelSize, float] | None:
    """Returns the sizes of the model at `base` and of a GPU of the run, or None if it has none, or they are unknown."""
    device = "cuda" if own_server(config.engine) is not None else config.learner.device
    if not (total := machine.gpu_bytes(device)):
        return None
    try:
        return model_size(base), total
    except (AttributeError, OSError, TypeError, ValueError) as error:  # the boundary to transformers' configurations
        log.debug("%s: its sizes are not known: %s", base, error)
        return None


def _with_checkpointing(loaded: LoadedConfig, value: int, reason: str) -> LoadedConfig:
    learner = loaded.config.learner
    if getattr(learner, "gradient_checkpointing", None) != "auto":
        return loaded
    loaded = _with(loaded, learner=learner.model_copy(update={"gradient_checkpointing": value}))
    return replace(loaded, auto={**loaded.auto, "gradient_checkpointing": reason}) if reason else loaded


def _with_length(loaded: LoadedConfig, length: int | None, reason: str) -> LoadedConfig:
    model = loaded.config.model.model_copy(update={"max_length": length})
    return replace(_with(loaded, model=model), auto={**loaded.auto, "max_length": reason})


def _with(loaded: LoadedConfig, **sections: Section) -> LoadedConfig:
    return replace(loaded, config=loaded.config.model_copy(update=sections))


def with_rate(loaded: LoadedConfig, rate: float, reason: str) -> LoadedConfig:
    """Returns the configuration with a learning rate in place of auto, and the reason for it."""
    train = loaded.config.train.model_copy(update={"learning_rate": rate})
    return replace(_with(loaded, train=train), auto={**loaded.auto, "learning_rate": reason})


def _decide_dtype(loaded: LoadedConfig, base: str, recorded: str) -> LoadedConfig:
    """Returns the configuration with the recorded dtype, else what the learner's device computes well."""
    if loaded.config.model.dtype != "auto" or loaded.config.learner.weights == "server":
        return loaded  # the server decides
    if recorded:
        return _with_dtype(loaded, recorded, "as it was trained")
    model = loaded.config.model
    is_exact = engine_traits(loaded.config.engine, loaded.directory).weights == "here" and model.quantize is None
    choice = resolve_dtype(model, base, device=loaded.config.learner.device, may_be_exact=is_exact)
    log.info("model.dtype %s (auto: %s)", choice.name, choice.reason)
    return _with_dtype(loaded, choice.name, choice.reason)


def _with_dtype(loaded: LoadedConfig, dtype: str, reason: str) -> LoadedConfig:
    model = loaded.config.model.model_copy(update={"dtype": dtype})
    return replace(_with(loaded, model=model), auto={**loaded.auto, "dtype": reason})
