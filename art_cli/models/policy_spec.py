"""PolicySpec: a policy without its weights, as plain data, for policies that live elsewhere.

It is passed to the loop, to engines in separate processes and to users' own engines. Reading a spec loads
configurations and a tokenizer, never weights.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.schema import ModelConfig
from art_cli.models.adapter_config import read_lora
from art_cli.models.base_files import read_template
from art_cli.models.base_source import loading
from art_cli.models.device import pick_device
from art_cli.models.loading import resolve_dtype
from art_cli.models.model_shape import length_of
from art_cli.models.run_memory import empty_model, linear_modules, num_experts
from art_cli.models.tokenizer import load_tokenizer
from art_cli.models.weights import Weights
from art_cli.runs.manifest import Origin


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, independent of its step.

    Example: PolicySpec(base="Qwen/Qwen3-0.6B", dtype="bfloat16", vocabulary=151936, max_length=40960, lora_rank=16,
    chat_template="{% for message in ...", learner_device="cuda:0")
    """

    base: str  # hub id or directory of the base model
    dtype: str  # dtype of the base weights, "" if only a server knows it; adapters are float32
    vocabulary: int  # number of token ids in the model
    max_length: int  # context length for prompt and reply together
    lora_rank: int | None  # largest rank in the adapter; None means no adapter
    chat_template: str | None  # Jinja; None means the tokenizer's own
    learner_device: str | None  # "cpu" or "cuda:0"; None means no learner
    learner_gpus: int = 1  # local GPUs used by learner processes, starting at `learner_device`
    lora_targets: tuple[str, ...] = ()  # for a mixture of experts, module names with an adapter, if known
    quantize: str | None = None  # "4bit" for a base in 4 bits


def spec_of(weights: Weights) -> PolicySpec:
    """Returns the spec of a policy held in this process."""
    template = weights.tokenizer.chat_template
    return PolicySpec(
        base=weights.base,
        dtype=weights.dtype_name,
        vocabulary=weights.vocabulary,
        max_length=weights.max_length,
        lora_rank=max(map(_largest_rank, _adapters(weights)), default=None),
        chat_template=template if isinstance(template, str) else None,
        learner_device=str(weights.device),
        lora_targets=_targets(weights.model.config, _adapters(weights)),
        quantize=weights.quantize,
    )


def origin_of(policy: PolicySpec, base: str) -> Origin:
    """Returns the policy's identity apart from its checkpoint. `base` is the base's digest."""
    template = "" if policy.chat_template is None else hashlib.sha256(policy.chat_template.encode()).hexdigest()
    return Origin(base=base, template=template, dtype=policy.dtype, quantize=policy.quantize or "")


def tokenizer_of(policy: PolicySpec) -> Any:
    """Returns the tokenizer of the base, with the policy's chat template."""
    tokenizer = load_tokenizer(policy.base)
    if policy.chat_template is not None:
        tokenizer.chat_template = policy.chat_template
    return tokenizer


def _adapters(weights: Weights) -> list[Any]:
    return list(weights.model.peft_config.values()) if weights.has_adapter else []


def read_spec(
    config: ModelConfig,
    base: str,
    *,
    adapter: Path | None = None,
    device: str | None = None,
    named: str | None = None,
    is_remote: bool = False,
) -> PolicySpec:
    """Reads the spec of a policy on `base` (a hub id or directory) from the files of base and adapter.

    `device` is the learner's device as configured; None means no learner. `named` is the base's name in errors, as in
    `load_weights`. `is_remote`: the weights live on a server.
    Raises UsageError if `base` cannot be loaded.
    """
    import transformers

    dtype: str = "" if config.dtype == "auto" else config.dtype
    if not is_remote:
        dtype = resolve_dtype(config, base, device=device or "auto", named=named).name
    with loading(base, named):
        files: Any = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        has_tokenizer = adapter is not None and (adapter / "tokenizer_config.json").is_file()
        template = load_tokenizer(str(adapter) if has_tokenizer else base).chat_template
    if config.chat_template is not None:
        template = read_template(config.chat_template)
    configured = config.lora.rank if config.lora is not None else None
    trained = None if adapter is None else read_lora(adapter)
    return PolicySpec(
        base=base,
        dtype=dtype,
        vocabulary=files.get_text_config().vocab_size,
        max_length=length_of(config, files),
        lora_rank=configured if trained is None else _largest_rank(trained),
        chat_template=template if isinstance(template, str) else None,
        learner_device=None if device is None else pick_device(device),
        lora_targets=_planned_targets(config, files) if trained is None else _targets(files, [trained]),
        quantize=config.quantize,
    )


def rank_of(adapter: Path) -> int:
    """Returns the largest rank in an adapter's files."""
    return _largest_rank(read_lora(adapter))


def _largest_rank(lora: Any) -> int:
    rank: int = max([lora.r, *lora.rank_pattern.values()])
    return rank


def _targets(model_config: Any, loras: Sequence[Any]) -> tuple[str, ...]:
    """Returns the last parts of the adapted modules' names; () without experts, or if a pattern selects modules."""
    if not num_experts(model_config) or any(isinstance(lora.target_modules, str) for lora in loras):
        return ()
    return tuple(sorted({name.rpartition(".")[2] for lora in loras for name in lora.target_modules or ()}))


def _planned_targets(config: ModelConfig, model_config: Any) -> tuple[str, ...]:
    """Like `_targets`, for adapters that are not made yet."""
    if config.lora is None or not num_experts(model_config):
        return ()
    if config.lora.targets == "all-linear":
        return linear_targets(model_config)
    named = [] if isinstance(config.lora.targets, str) else config.lora.targets
    return tuple(sorted({name.rpartition(".")[2] for name in named}))


def linear_targets(model_config: Any) -> tuple[str, ...]:
    """Returns the last parts of the names of all linear modules but the head; () without experts."""
    if not num_experts(model_config):
        return ()
    return tuple(sorted({name.rpartition(".")[2] for name in linear_modules(empty_model(model_config))}))
