"""Decisions by the memory of a GPU: what `auto` and null leave open, and whether a run fits, before anything starts.

    RunConfig, ModelSize, bytes of a GPU -> GpuUse -> checkpointing, context, vLLM's share beside a learner; Misfit

Pure functions of numbers; models/run_memory.py has the estimates. All GPUs of the machine are taken to be alike.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from art_cli.config.schema import RunConfig
from art_cli.engines.vllm.arguments import num_gpus, num_replicas, own_server, own_share, shares_gpu
from art_cli.models.run_memory import (
    GPU_TOKENS,
    ModelSize,
    RunMemory,
    cache_tokens,
    expected_share,
    misfit,
    run_memory,
)

STEP = 1024  # contexts are multiples of it


class GpuUse(NamedTuple):
    """How a run uses a GPU of the learner and one of vLLM, which are the same where both share it."""

    total: float  # bytes of a GPU
    learner: RunMemory
    engine: RunMemory | None  # None: art starts no vLLM
    share: float  # of a GPU that vLLM gets; 0 without vLLM


def describe_use(use: GpuUse, size: ModelSize) -> str:
    """Returns what `art check` adds of the GPU and of a mixture of experts, or "" if there is nothing to add."""
    notes = []
    if use.engine is not None:
        tokens = cache_tokens(use.total, use.engine, use.share)
        beside = ", beside the learner's step (train.max_staleness)" if use.engine.is_beside else ""
        notes.append(f"vLLM gets about {use.share:.2f} of its GPU{beside}, and its cache {tokens:,} tokens")
    if size.experts:
        notes.append(f"its {size.experts} experts get no adapter, because they are no linear layers")
    return "".join(f"; {note}" for note in notes)


class Misfit(NamedTuple):
    """Example: Misfit("vLLM's cache holds 7,000 tokens ..., and model.max_length is 8,192", "model.max_length=6144")"""

    problem: str
    cure: str  # the override that makes it fit, or "" if none does


def gpu_use(config: RunConfig, size: ModelSize, total: float, inherited: Mapping[str, str]) -> GpuUse:
    """Returns how the run uses GPUs of `total` bytes. `config` is decided but for what follows from this."""
    engine, learner = own_server(config.engine), config.learner
    device = "cuda" if learner.device == "auto" else learner.device
    is_trained = learner.trains_weights and learner.weights != "server" and device.startswith("cuda")
    is_shared = engine is not None and is_trained and shares_gpu(engine, device, learner.processes, inherited)
    is_beside = is_shared and (config.train.max_staleness > 0 or (engine is not None and engine.sleep == 0))
    budget = getattr(learner, "micro_batch_tokens", None) or GPU_TOKENS
    divided = learner.num_ranks if getattr(learner, "shard", "node") == "all" else learner.processes
    learners = divided if is_trained else 0
    engines = num_gpus(engine) // num_replicas(engine) if engine is not None else 0

    def on_gpu(learners: int, engines: int) -> RunMemory:
        return run_memory(
            size,
            element=2 if config.model.dtype == "bfloat16" else 4,
            is_4bit=config.model.quantize is not None,
            rank=None if config.model.lora is None else config.model.lora.rank,
            tokens=max(budget, config.model.max_length or 0),
            learners=learners,
            engines=engines,
            is_beside=is_beside,
        )

    of_engine = on_gpu(learners if is_shared else 0, engines) if engine is not None else None
    own = own_share(engine) if engine is not None else None
    share = 0.0 if of_engine is None else expected_share(total, of_engine) if own is None else own
    return GpuUse(total, on_gpu(learners, engines if is_shared else 0), of_engine, share)


def context(use: GpuUse, own: int) -> int | None:
    """Returns what `model.max_length: null` is, or None if vLLM's cache holds the model's `own` context, or nothing."""
    if use.engine is None:
        return None
    tokens = cache_tokens(use.total, use.engine, use.share) // STEP * STEP
    return tokens if 0 < tokens < own else None


def find_misfit(config: RunConfig, size: ModelSize, total: float, inherited: Mapping[str, str]) -> Misfit | None:
    """Returns why the run does not fit on GPUs of `total` bytes, with the key that changes it, or None if it fits."""

    def problem(config: RunConfig) -> str:
        use, needed = gpu_use(config, size, total, inherited), config.model.max_length or STEP
        each = (use.learner, use.engine) if use.engine is not None else (use.learner,)
        return next(filter(None, (misfit(total, run, share=use.share, max_length=needed) for run in each)), "")

    if not (found := problem(config)):
        return None
    smaller = _smaller(config, context(gpu_use(config, size, total, inherited), config.model.max_length or 0))
    return Misfit(found, next((cure for cure, changed in smaller if not problem(changed)), ""))


def _smaller(config: RunConfig, max_length: int | None) -> Iterator[tuple[str, RunConfig]]:
    """Yields the overrides that make a run smaller, those that change least first, and the run with each."""
    model, learner = config.model, config.learner
    changes: list[tuple[str, str, JsonValue]] = [("learner", "micro_batch_tokens", STEP)]
    if max_length is not None:
        changes.append(("model", "max_length", max_length))
    if model.quantize is None and model.lora is not None and learner.num_ranks == 1:
        changes.append(("model", "quantize", "4bit"))
    for section, key, value in changes:
        if key in type(getattr(config, section)).model_fields:
            changed = getattr(config, section).model_copy(update={key: value})
            yield f"{section}.{key}={value}", config.model_copy(update={section: changed})
