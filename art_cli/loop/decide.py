"""Decides every open value in a configuration, and records the reason.

    engine: auto                vLLM or embedded, depending on the machine (engine_choice.py)
    model.dtype: auto           the run's previous dtype; else a dtype that suits the learner's device
    train.learning_rate: auto   the run's previous rate; else by the model's width (learners/learning_rate.py)
    train.max_kl: auto          the run's previous bound; else MAX_KL, if the learner holds the weights
    loss.baseline: auto         the run's previous baseline; else by the step's attempts and the judge
    learner.gradient_checkpointing: auto, model.max_length: null   by GPU memory (gpu_fit.py)

    decide:   engine -> base model -> dtype, rate, memory -> config.json

Training calls `decide` once. Other commands call the functions they need.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config import schema
from art_cli.config.checks import ranks
from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import RunConfig
from art_cli.engines import EngineTraits, engine_traits
from art_cli.engines.vllm.arguments import own_server, own_share
from art_cli.judges.blend import single_judges
from art_cli.learners.learning_rate import choose_rate
from art_cli.loop.engine_choice import Machine, choose_engine, vllm_obstacle
from art_cli.loop.gpu_fit import context, gpu_use
from art_cli.loop.record import claim_config
from art_cli.loop.references import missing_targets
from art_cli.loop.startup import Startup
from art_cli.models.base_source import find_base, find_on_hub
from art_cli.models.loading import import_libraries, resolve_dtype
from art_cli.models.model_shape import context_of, read_shape, width_of
from art_cli.models.run_memory import GIB, ModelSize, checkpoint_from, model_bytes, size_of
from art_cli.runs.run_checkpoints import base_of, find
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError, ConfigError, Problem

log = logging.getLogger(__name__)

# Largest KL of a step in nats per token. On a task with a cheap path that pays a quarter, SmolLM2-135M froze without a
# bound, and learned most or all of the task within it (benchmarks/learning/tasks/parcels.py, results/LOG.md).
MAX_KL = 0.05
# Largest number of a step's attempts with a shrunk baseline. With steps of 16, SmolLM2-135M learned that task on each
# of three seeds; with 32 it took the cheap path (results/LOG.md, "Small steps"). And the smallest number of groups:
# from four on, James and Stein's estimator, which draws means toward their mean, is better than the means.
SMALL_STEP, LEAST_GROUPS = 16, 4


@dataclass(frozen=True)
class Decided:
    """A run's configuration without open values."""

    loaded: LoadedConfig
    traits: EngineTraits
    base: str | None  # hub id or directory; None for an engine that brings its model


def decide(loaded: LoadedConfig, files: RunDir, startup: Startup) -> Decided:
    """Decides every open value in a run's configuration, and writes config.json.

    Builds the model if `model.base` is a function. Raises UsageError if the base cannot be loaded, ConfigError if a
    LoRA target matches no module, and RunError like `claim_config`.
    """
    loaded = decide_engine(loaded)
    config = loaded.config
    traits, base = engine_traits(config.engine, loaded.directory), None
    if traits.can_train:
        if computes_here(config, traits) and not config.learner.imports_first:
            import_libraries(has_adapter=config.model.lora is not None)
            startup.reached("torch and transformers")
        base = find_base(config.model.base, directory=loaded.directory, built=files.base)
        if wrong := list(missing_targets(config.model, Path(base))):
            raise ConfigError([Problem(key, loaded.places.of(key), message) for key, message in wrong])
        is_begun = bool(files.checkpoint_steps()) and os.path.lexists(files.config_path)  # a fork: not yet
        loaded = decide_by_base(loaded, base, is_begun=is_begun)
    claim_config(files, loaded)
    return Decided(loaded, traits, base)


def computes_here(config: RunConfig, traits: EngineTraits) -> bool:
    """Returns True if the engine or the learner computes with weights in this process."""
    return "here" in (traits.weights, config.learner.weights)


def describe(loaded: LoadedConfig) -> str:
    """Example: "engine embedded (auto: no GPU here), learner torch"."""
    reason = loaded.auto.get("engine")
    because = f" (auto: {reason})" if reason else ""
    return f"engine {loaded.config.engine.title}{because}, learner {loaded.config.learner.name}"


# --- the engine -------------------------------------------------------------------------------------------------------


def decide_engine(
    loaded: LoadedConfig, machine: Machine | None = None, *, trained_in: Collection[str] = ()
) -> LoadedConfig:
    """Replaces `engine: auto`, and logs the reason. It will serve checkpoints with the dtypes `trained_in`."""
    config, model = loaded.config, loaded.config.model
    if config.engine.name != "auto":
        return loaded
    if model.dtype == "auto" and "float32" in trained_in:
        model = model.model_copy(update={"dtype": "float32"})
    local, obstacle = loaded.directory / model.base, vllm_obstacle(model, loaded.directory)
    base = str(local) if local.is_dir() else config.model.base
    choice = choose_engine(machine or Machine(), obstacle=obstacle, base=base, quantize=config.model.quantize)
    log.info("engine %s (auto: %s)", choice.name, choice.reason)
    engine = schema.VllmEngineConfig(name="vllm") if choice.name == "vllm" else schema.EmbeddedEngineConfig()
    return loaded.with_value("engine", engine, choice.reason)


# --- values by the base model -----------------------------------------------------------------------------------------


def decide_by_base(
    loaded: LoadedConfig, base: str, *, recorded: str = "", is_begun: bool = False, machine: Machine | None = None
) -> LoadedConfig:
    """Decides dtype, learning rate, bound, checkpointing and context. `recorded` is the run's previous dtype.

    If `is_begun`, the run keeps its context, even null. Raises UsageError if the base cannot be loaded.
    """
    shape, loaded = read_shape(base), _decide_dtype(loaded, base, recorded)
    if loaded.config.train.learning_rate == "auto":
        rate, reason = choose_rate(width_of(shape), loaded.config.model.lora)
        loaded = loaded.with_value("train.learning_rate", rate, reason)
    if loaded.config.train.max_kl == "auto":
        learner = loaded.config.learner
        can_draw_back = learner.trains_weights and learner.weights != "server"
        reason = "one step must not freeze the policy" if can_draw_back else "the learner has no weights here"
        loaded = loaded.with_value("train.max_kl", MAX_KL if can_draw_back else None, reason)
    loaded = _decide_baseline(loaded)
    return _decide_memory(loaded, shape, machine or Machine(), is_begun=is_begun)


def _decide_baseline(loaded: LoadedConfig) -> LoadedConfig:
    """Chooses the shrunk baseline for small steps of rewards that compare across scenarios."""
    config, loss, rollout = loaded.config, loaded.config.loss, loaded.config.rollout
    if not isinstance(loss, schema.GrpoConfig) or loss.baseline != "auto" or config.algorithm is not None:
        return loaded
    has_noise = not isinstance(config.judge, schema.NoJudgeConfig) and config.judge.noise is not None
    reason, num = f"a step has {rollout.groups_per_step} groups of {rollout.group_size}", rollout.groups_per_step
    if num < LEAST_GROUPS or num * rollout.group_size > SMALL_STEP:
        return loaded.with_value("loss.baseline", "group", reason)
    if rollout.sources or ranks(config.judge):
        return loaded.with_value("loss.baseline", "group", "rewards compare within a group only")
    if loss.scale_advantages or has_noise or rollout.refill > 0:
        return loaded.with_value("loss.baseline", "group", "groups are weighed or replaced")
    return loaded.with_value("loss.baseline", "shrunk", reason)


def _decide_dtype(loaded: LoadedConfig, base: str, recorded: str) -> LoadedConfig:
    """Uses the recorded dtype, or a dtype that suits the learner's device."""
    model = loaded.config.model
    if model.dtype != "auto" or loaded.config.learner.weights == "server":
        return loaded  # the server decides
    if recorded:
        return loaded.with_value("model.dtype", recorded, "as it was trained")
    is_exact = engine_traits(loaded.config.engine, loaded.directory).weights == "here" and model.quantize is None
    choice = resolve_dtype(model, base, device=loaded.config.learner.device, may_be_exact=is_exact)
    log.info("model.dtype %s (auto: %s)", choice.name, choice.reason)
    return loaded.with_value("model.dtype", choice.name, choice.reason)


def _decide_memory(loaded: LoadedConfig, shape: Any, machine: Machine, *, is_begun: bool) -> LoadedConfig:
    """Decides checkpointing, context and vLLM's memory share from the GPU's memory.

    vLLM gets a share only if it samples on the learner's GPU during updates. Memory in use counts as free memory.
    """
    if (sized := read_sizes(loaded, shape, machine)) is None:
        return _with_checkpointing(loaded, False, "")
    use = gpu_use(loaded.config, *sized)
    gpu = f"a GPU of {use.total / GIB:.1f} GiB"
    loaded = _with_checkpointing(
        loaded, checkpoint_from(use.total, use.learner), f"what a token keeps there, and {gpu}"
    )
    engine = own_server(loaded.config.engine)
    if use.learner.is_beside and engine is not None and own_share(engine) is None:
        log.info("vLLM gets %.3f of %s (auto: the learner works at the same time)", use.share, gpu)
        loaded = loaded.with_value("engine.args", {**engine.args, "gpu-memory-utilization": use.share})
    if is_begun or loaded.config.model.max_length is not None:
        return loaded
    if (length := context(use, context_of(shape))) is None:
        return loaded
    reason = f"what vLLM's cache holds on {gpu}"
    log.info("model.max_length %d (auto: %s)", length, reason)
    return loaded.with_value("model.max_length", length, reason)


def _with_checkpointing(loaded: LoadedConfig, value: int, reason: str) -> LoadedConfig:
    key = "learner.gradient_checkpointing"
    is_open = getattr(loaded.config.learner, "gradient_checkpointing", None) == "auto"
    return loaded.with_value(key, value, reason) if is_open else loaded


class Sizes(NamedTuple):
    """The arguments of `gpu_use` that are read from models and the machine."""

    model: ModelSize
    total: float  # bytes of a GPU
    inherited: Mapping[str, str]  # environment variables
    others: float  # bytes of other models on the learner's GPU


def read_sizes(loaded: LoadedConfig, shape: Any, machine: Machine) -> Sizes | None:
    """Returns the models' and the GPU's sizes; None without either. `shape`: the policy's transformers config."""
    config = loaded.config
    device = "cuda" if own_server(config.engine) is not None else config.learner.device
    if not (total := machine.gpu_bytes(device)):
        return None
    try:
        return Sizes(size_of(shape), total, os.environ, _other_bytes(config, loaded.directory))
    except (AttributeError, OSError, TypeError, ValueError) as error:  # boundary to transformers' configurations
        log.debug("%s: its sizes are not known: %s", config.model.base, error)
        return None


def _other_bytes(config: RunConfig, directory: Path) -> float:
    """Returns the bytes of a local teacher's weights, and of reward models as judges, on the learner's GPU.

    A model whose size cannot be read counts as 0, because loading it reports the problem.
    """
    first = ("auto", "cuda", "cuda:0")
    judges = [each for each in single_judges(config) if isinstance(each, schema.RewardModelJudgeConfig)]
    here = first if config.learner.device in first else (config.learner.device,)
    models = {(each.model, True) for each in judges if each.device in here}
    if isinstance(config.loss, schema.DistillConfig) and config.loss.teacher.base_url is None:
        models.add((config.loss.teacher.model, False))
    num_bytes = 0.0
    for name, is_judge in models:
        try:
            place = str(directory / name)
            if not is_judge and (found := find(directory / name)) is not None:
                place = base_of(found) if found.is_adapter else str(found.path)
            elif not (directory / name).is_dir():
                find_on_hub(name, None)
                place = name
            num_bytes += model_bytes(place, is_judge=is_judge)
        except (ArtError, AttributeError, OSError, TypeError, ValueError) as error:
            log.debug("%s: its size is not known: %s", name, error)
    return num_bytes
