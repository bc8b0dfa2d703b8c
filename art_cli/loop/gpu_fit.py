"""Decisions by GPU memory, before the run starts: values for `auto` and null, and whether the run fits.

    RunConfig, ModelSize, bytes of a GPU -> GpuUse -> checkpointing, context, vLLM's share on the learner's GPU; Misfit

Pure functions of numbers; models/run_memory.py has the estimates. All GPUs are assumed to be the same.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from art_cli.config.schema import RunConfig
from art_cli.engines.vllm.arguments import num_gpus, num_replicas, own_server, own_share, shares_gpu
from art_cli.models.run_memory import (
    GIB,
    GPU_TOKENS,
    ModelSize,
    RunMemory,
    cache_tokens,
    expected_share,
    misfit,
    run_memory,
)

STEP = 1024  # contexts are multiples of this


class GpuUse(NamedTuple):
    """A run's use of a learner GPU and a vLLM GPU, possibly the same GPU."""

    total: float  # bytes of a GPU
    learner: RunMemory
    engine: RunMemory | None  # None if art starts no vLLM
    share: float  # vLLM's share of the GPU; 0 without vLLM


def describe_use(use: GpuUse, size: ModelSize) -> str:
    """Describes the GPU and a mixture of experts for `art check`, or returns ""."""
    notes = []
    if use.engine is not None:
        tokens = cache_tokens(use.total, use.engine, use.share)
        beside = ", next to the learner's step (train.max_staleness)" if use.engine.is_beside else ""
        notes.append(f"vLLM gets about {use.share:.2f} of its GPU{beside}, and its cache {tokens:,} tokens")
    if use.learner.others:
        notes.append(f"a local teacher or judge takes about {use.learner.others / GIB:.1f} GiB of its GPU")
    if size.experts:
        notes.append(f"its {size.experts} experts get no adapter, because they are not linear layers")
    return "".join(f"; {note}" for note in notes)


class Misfit(NamedTuple):
    """Example: Misfit("vLLM's cache holds 7,000 tokens ..., and model.max_length is 8,192", "model.max_length=6144")"""

    problem: str
    cure: str  # override that makes the run fit, or ""


def gpu_use(
    config: RunConfig, size: ModelSize, total: float, inherited: Mapping[str, str], others: float = 0.0
) -> GpuUse:
    """Returns the use of GPUs with `total` bytes, `others` of them for local teachers and judges. `config` is otherwise
    decided."""
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
            is_offloaded=getattr(learner, "offload_optimizer", False),
            others=others,
        )

    of_engine = on_gpu(learners if is_shared else 0, engines) if engine is not None else None
    own = own_share(engine) if engine is not None else None
    share = 0.0 if of_engine is None else expected_share(total, of_engine) if own is None else own
    return GpuUse(total, on_gpu(learners, engines if is_shared else 0), of_engine, share)


def context(use: GpuUse, own: int) -> int | None:
    """Returns the context for `model.max_length: null`, unless the model's `own` context fits in the cache or no
    context does."""
    if use.engine is None:
        return None
    tokens = cache_tokens(use.total, use.engine, use.share) // STEP * STEP
    return tokens if 0 < tokens < own else None


def find_misfit(
    config: RunConfig, size: ModelSize, total: float, inherited: Mapping[str, str], others: float = 0.0
) -> Misfit | None:
    """Returns why the run does not fit on GPUs with `total` bytes, and the override that helps, if any."""

    def problem(config: RunConfig) -> str:
        use, needed = gpu_use(config, size, total, inherited, others), config.model.max_length or STEP
        each = (use.learner, use.engine) if use.engine is not None else (use.learner,)
        return next(filter(None, (misfit(total, run, share=use.share, max_length=needed) for run in each)), "")

    if not (found := problem(config)):
        return None
    smaller = _smaller(config, context(gpu_use(config, size, total, inherited, others), config.model.max_length or 0))
    return Misfit(found, next((cure for cure, changed in smaller if not problem(changed)), ""))


def _smaller(config: RunConfig, max_length: int | None) -> Iterator[tuple[str, RunConfig]]:
    """Yields overrides that make the run smaller, mildest first, with the resulting configuration."""
    model, learner = config.model, config.learner
    changes: list[tuple[str, str, JsonValue]] = [("learner", "micro_batch_tokens", STEP)]
    if max_length is not None:
        changes.append(("model", "max_length", max_length))
    if model.lora is None and learner.num_ranks == 1:
        changes.append(("learner", "offload_optimizer", True))
    if model.quantize is None and model.lora is not None and learner.num_ranks == 1:
        changes.append(("model", "quantize", "4bit"))
    for section, key, value in changes:
        if key in type(getattr(config, section)).model_fields:
            changed = getattr(config, section).model_copy(update={key: value})
            yield f"{section}.{key}={str(value).lower()}", config.model_copy(update={section: changed})
