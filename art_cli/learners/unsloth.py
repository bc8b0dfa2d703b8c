"""Loads the policy (base in 16 or 4 bits, plus adapter) through Unsloth, or explains in one line why it cannot.

    obstacle() checks the installation; load_model, or load_bare without adapter, serve models/loading.py

TorchLearner takes the step itself. Importing Unsloth replaces forward passes in transformers and peft, so Unsloth must
be imported before both, and only the loading code imports it. On a GPU Unsloth's attention ignores a pack's tree; the
learner detects this by comparison and trains on plain rows. From version 2026.10.9 on Unsloth also runs without a GPU,
using transformers' attention.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from types import ModuleType
from typing import Any

import torch

from art_cli.config.schema import LoraConfig, ModelConfig
from art_cli.models import precision
from art_cli.models.adapters import with_adapter
from art_cli.models.model_shape import length_of
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runtime.errors import LearnerError, UsageError
from art_cli.runtime.processes.child import kept_from_children
from art_cli.runtime.scratch import user_cache

FLOOR = "2026.10"  # oldest version that pyproject.toml allows
CPU_FLOOR = "2026.10.9"  # oldest version that runs without a GPU; older versions raise NotImplementedError at import
NEEDED = ("torch", "transformers", "peft", "trl", "unsloth_zoo")  # packages whose versions Unsloth checks at import


def obstacle() -> str | None:
    """Returns one line with the reason why Unsloth cannot run here and a cure; None when no obstacle is known.

    It reads installed versions and asks torch for a GPU. It does not import Unsloth.
    """
    try:
        installed = version("unsloth")
    except PackageNotFoundError:
        return "Unsloth is not installed: pip install 'art-cli[unsloth]'"
    from packaging.version import Version  # comes with transformers

    if Version(installed) < Version(FLOOR):
        return f"Unsloth {installed} is too old: pip install 'unsloth>={FLOOR}'"
    if unmet := _unmet_requirement():
        wanted, found = unmet
        return f"Unsloth {installed} needs {wanted}, and {found}: pip install '{wanted}'"
    if Version(installed) < Version(CPU_FLOOR) and not torch.cuda.is_available():
        return f"Unsloth {installed} needs a GPU, and torch finds no GPU: pip install 'unsloth>={CPU_FLOOR}'"
    return None


def _unmet_requirement() -> tuple[str, str] | None:
    """Returns Unsloth's earliest unmet requirement. Example: ("transformers<=5.17", "5.23.0 is installed")"""
    from packaging.requirements import Requirement

    for text in requires("unsloth") or []:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name not in NEEDED or not applies:
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            return wanted, f"{requirement.name} is not installed"
        if not requirement.specifier.contains(found, prereleases=True):
            return wanted, f"{found} is installed"
    return None


def load_model(config: ModelConfig, base: str, place: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Returns the base with a fresh adapter, as a PeftModel. Raises LearnerError if Unsloth cannot do it."""
    if config.lora is None:
        raise LearnerError("learner 'unsloth' trains LoRA adapters only: set model.lora, or learner=torch")
    unsloth, model = _load(config, base, place, dtype, seed)
    with _kept_apart():
        try:
            model = unsloth.FastLanguageModel.get_peft_model(
                model,
                r=config.lora.rank,
                lora_alpha=config.lora.alpha,
                target_modules=config.lora.targets,
                lora_dropout=0.0,
                bias="none",
                use_gradient_checkpointing=False,
                random_state=seed,
            )
        except ValueError as error:
            raise UsageError(f"model.lora.targets: {str(error).strip().splitlines()[0]}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def load_bare(config: ModelConfig, base: str, place: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Returns the base without adapter. It can carry several clients' adapters, which are made by PEFT.

    The clients share Unsloth's base forward passes. Unsloth's fused adapter passes are not used, because they assume a
    single adapter. Raises LearnerError if Unsloth cannot do it.
    """
    return _load(config, base, place, dtype, seed)[1]


def check_adapters(weights: Weights) -> None:
    """Raises LearnerError if adapters on a copied bare model have no effect.

    This happens when Unsloth's patched forward pass keeps references to the original model's layers.
    """
    made = with_adapter(weights, LoraConfig(rank=1, targets="all-linear"), 0)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    ids = list(range(min(16, weights.vocabulary)))
    if token_logprobs(made, ids) == token_logprobs(weights, ids):
        raise LearnerError(
            f"Unsloth {version('unsloth')} runs this model past the adapters of clients: set learner=torch"
        )


def _load(config: ModelConfig, base: str, place: torch.device, dtype: torch.dtype, seed: int) -> tuple[ModuleType, Any]:
    """Returns the Unsloth module and the loaded base."""
    if (reason := obstacle()) is not None:
        raise LearnerError(f"learner 'unsloth' cannot run here: {reason}, or set learner=torch")
    if config.quantize is not None:
        precision.require_bitsandbytes()
    unsloth = _import()
    import transformers

    shape = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    with _kept_apart():
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            model_name=base,
            max_seq_length=length_of(config, shape),
            dtype=dtype,
            load_in_4bit=config.quantize == "4bit",
            # otherwise Unsloth may load a copy in another quantization, which the engine lacks
            use_exact_model_name=True,
            use_gradient_checkpointing=False,  # PackRunner does it, by learner.gradient_checkpointing
            random_state=seed,
        )
    _check(model, config, place)
    precision.keep_layout(model)
    return unsloth, model


def _check(model: Any, config: ModelConfig, place: torch.device) -> None:
    """Raises LearnerError if the loaded model differs from the request. Unsloth itself only prints a message."""
    if config.quantize is not None and not precision.is_quantized(model):
        raise LearnerError(
            f"Unsloth {version('unsloth')} did not load {config.base} in {config.quantize}: set model.quantize=null"
        )
    found = next(model.parameters()).device
    if found.type != place.type:
        raise LearnerError(
            f"Unsloth {version('unsloth')} put the model on {found.type}, not {place.type}: "
            "set learner.device=auto, or learner=torch"
        )


def _import() -> ModuleType:
    """Imports and returns Unsloth. Raises LearnerError if the import fails."""
    try:
        with _kept_apart():
            # by default Unsloth counts users by a download at every load, and compiles into the working directory
            os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
            os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(user_cache() / "unsloth"))
            import unsloth
    except Exception as error:  # boundary to Unsloth's import, which checks and patches half a dozen packages
        summary = " ".join(str(error).split())[:200]
        raise LearnerError(
            f"Unsloth {version('unsloth')} cannot be imported here ({type(error).__name__}: {summary}): "
            "pip install -U unsloth unsloth_zoo, or set learner=torch"
        ) from error
    found: ModuleType = unsloth
    return found


@contextlib.contextmanager
def _kept_apart() -> Iterator[None]:
    """Isolates Unsloth's side effects.

    Unsloth's prints go to stderr, because stdout holds results. The environment variables it sets (allocator and
    compiler settings) stay out of child processes. Torch's generator, which Unsloth seeds, is restored.
    """
    with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(), kept_from_children():
        yield
