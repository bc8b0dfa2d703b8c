"""Source: the model to serve or export, resolved from files without the training YAML.

A checkpoint's manifest names the base model, adapter_config.json describes the adapter, and the run's config.json
contains dtype, context and sampling settings. Plain PEFT adapters, model directories and hub ids also work.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.chat.requests import Sampling
from art_cli.config.schema import ModelConfig
from art_cli.config.sections.engine_config import HOSTED
from art_cli.runs import run_checkpoints
from art_cli.runs.manifest import Manifest
from art_cli.runs.run_checkpoints import Found, Which
from art_cli.runs.run_dir import RunDir
from art_cli.runs.system_prompt import SystemPrompt, read_prompt
from art_cli.runtime.errors import UsageError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NAME = re.compile(r"[\w.@/-]+")
DTYPES = ("auto", "float32", "bfloat16")


class Source(NamedTuple):
    """A policy to serve.

    Example: Source("mine", "Qwen/Qwen3-0.6B", Path("runs/mine/checkpoints/step_0040"), 40, "auto", None, Sampling())
    """

    name: str  # model name in requests
    base: str  # hub id or directory; full checkpoints name themselves
    adapter: Path | None  # adapter on the base; None for the base alone
    step: int
    dtype: str  # dtype of the base: "auto", "float32", "bfloat16"
    max_length: int | None  # prompt and reply tokens; None for the base model's context
    defaults: Sampling  # default sampling for requests; a run's sources use the run's settings
    run: RunDir | None = None
    manifest: Manifest | None = None
    quantize: str | None = None  # "4bit": the adapter was trained on a quantized base
    named: str | None = None  # the base's description in error messages: "--base 'x'"
    prompt: SystemPrompt | None = None  # the text added to each request, if the policy is a prompt
    is_hosted: bool = False  # True: the run's endpoint hosts the model, and `base` is its name there

    @property
    def trained_in(self) -> RunDir | None:
        """The run that made the checkpoint: `run`, or for a promoted checkpoint a night's run inside `run`."""
        return self.run and (run_checkpoints.run_of(self.adapter or Path(self.base)) or self.run)

    def __str__(self) -> str:
        what = f"step {self.step} of {self.run.root}" if self.run else str(self.adapter or self.base)
        return f"{self.name} ({what})"


def base_config(source: Source) -> ModelConfig:
    """Returns the base model's configuration, with the adapter's chat template if present."""
    own = source.adapter / run_checkpoints.TEMPLATE_FILE if source.adapter is not None else None
    return ModelConfig.model_validate(
        {
            "base": source.base,
            "lora": None,
            "dtype": source.dtype,
            "max_length": source.max_length,
            "quantize": source.quantize,
            "chat_template": own if own is not None and own.is_file() else None,
        }
    )


def parse_name(text: str) -> tuple[str | None, str]:
    """Splits "mine=runs/a" into ("mine", "runs/a"), and "runs/a" into (None, "runs/a")."""
    name, separator, target = text.partition("=")
    if not separator or Path(text).exists():
        return None, text
    if not NAME.fullmatch(name) or not target:
        raise UsageError(f"{text!r}: expected NAME=CHECKPOINT; a name is letters, digits and . _ @ / -")
    return name, target


def find_source(
    text: str,
    *,
    which: Which = "offered",
    base: str | None = None,
    dtype: str | None = None,
    built: Path | None = None,
) -> Source:
    """Resolves `[NAME=]CHECKPOINT`. `base` and `dtype` override the files.

    With a directory `built`, any value of model.base is allowed; built base models go there. Raises CheckpointError if
    the directory has nothing to serve, and UsageError for other invalid texts.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(DTYPES)}")
    name, target = parse_name(text)
    if (run := _run_of_base(target)) is not None:
        _refuse(target, which)
        run_checkpoints.log_policy(target, "the base model, as you asked")
        return of_base(run, name=name, base=base, dtype=dtype)
    found = run_checkpoints.find(Path(target), which=which) if target else None
    if found is not None:
        run_checkpoints.log_policy(found.path, found.why)
        return of_checkpoint(found, name=name, base=base, dtype=dtype)
    is_built = built is not None and (":" in target or Path(target).is_file())
    if not (HUB_ID.fullmatch(target) or is_built) or (target.startswith(".") and not is_built):
        raise UsageError(f"{target}: no such directory, and not a hub id")
    _refuse(target, which)
    run_checkpoints.log_policy(target, "the base model, as you asked")
    path, own = target, name or target.removeprefix("builtin:")
    if built is not None and is_built:
        from art_cli.models.base_source import find_base  # slow import

        path = find_base(target, directory=Path.cwd(), built=built / re.sub(r"\W", "_", target), named=repr(target))
    return Source(own, path, None, 0, dtype or "auto", None, Sampling(), named=repr(target))


def _refuse(target: str, which: Which) -> None:
    if which != "offered":
        raise UsageError(f"{target}: {run_checkpoints.option(which)} picks among the checkpoints of a run")


def _run_of_base(target: str) -> RunDir | None:
    """Returns the run for "RUN/base", which means the run's base model. Other targets give None."""
    path = Path(target)
    run = RunDir(path.parent)
    return run if target and path.name == "base" and run.checkpoint_steps() and run.config_path.exists() else None


def of_base(run: RunDir, *, name: str | None = None, base: str | None = None, dtype: str | None = None) -> Source:
    """Returns a run's base model without an adapter, with the run's sampling settings."""
    trained = of_checkpoint(run_checkpoints.choose(run, "newest"), base=base, dtype=dtype)
    if trained.is_hosted:
        raise UsageError(f"{run.root}/base: the run's model is an endpoint's, which needs no art serve")
    if trained.adapter is None and trained.prompt is None and base is None:
        raise UsageError(f"{run.root}/base: the run trains all weights; name its base model, or its step 0")
    return trained._replace(name=name or "base", adapter=None, step=0, run=None, manifest=None, prompt=None)


def of_checkpoint(
    found: Found, *, name: str | None = None, base: str | None = None, dtype: str | None = None
) -> Source:
    """Returns the source for a checkpoint, an adapter or a model directory."""
    found = _downloaded(found)
    config = run_checkpoints.run_config(found.run)
    model, sampling = config.get("model", {}), config.get("rollout", {}).get("sampling", {})
    prompt = read_prompt(found.path)
    is_hosted = prompt is not None and base is None and config.get("engine", {}).get("name") in HOSTED
    if is_hosted and found.manifest is not None:
        base_model, named = found.manifest.base, str(found.path)
    elif found.is_adapter or prompt is not None:
        if prompt is None:
            run_checkpoints.check_adapter(found.path)
        base_model = base or run_checkpoints.base_of(found)
        named = f"--base {base!r}" if base else f"{found.path}: its base model {base_model!r} (--base names another)"
    else:
        base_model, named = str(found.path.resolve()), str(found.path)
    return Source(
        name=name or (found.run.root if found.run is not None else found.path).resolve().name,
        base=base_model,
        adapter=found.path if found.is_adapter else None,
        step=found.step,
        dtype=dtype or (found.manifest.dtype if found.manifest else "") or model.get("dtype") or "auto",
        max_length=model.get("max_length"),
        defaults=Sampling(**{key: sampling[key] for key in Sampling.__struct_fields__ if key in sampling}),
        run=found.run,
        manifest=found.manifest,
        quantize=model.get("quantize"),
        named=named,
        prompt=prompt,
        is_hosted=is_hosted,
    )


def _downloaded(found: Found) -> Found:
    """Downloads remote weights (an adapter or full model). Local checkpoints are returned unchanged."""
    path = run_checkpoints.fetched(found.path)
    if path == found.path or found.manifest is None:
        return found
    manifest = msgspec.structs.replace(found.manifest, base=run_checkpoints.base_of(found))
    return found._replace(path=path, manifest=manifest, is_adapter=(path / "adapter_config.json").is_file())
