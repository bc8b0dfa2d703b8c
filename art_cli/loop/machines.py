"""Machines: facts of configs/machines.yaml, rates carried to another machine by its roofline, and where more GPUs stop
helping. Prompts and updates scale with operations per second, decoding with the memory's bandwidth."""

import difflib
import math
from typing import Literal, NamedTuple

import msgspec
import yaml

from art_cli.config.packaged import packaged
from art_cli.loop.simulation import Layout, Rates, Workload, simulate
from art_cli.runtime.errors import UsageError

MAX_GPUS = 1000
NODE = 8  # GPUs that NVLink joins
ROOM = 0.6  # share of a GPU's memory that weights may take; keys and values have the rest
PASS_FLOOR_S = 0.004  # of a pass on a GPU, however small the model: launches and sampling (an assumption)


class MachineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine; the numbers are of one of its GPUs, or of its whole CPU. configs/machines.yaml has the units."""

    kind: Literal["cpu", "gpu"]
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    usd_per_hour: float
    gpus: int = 1


class ModelSize(NamedTuple):
    """Example: ModelSize(parameters=4e9, trained=3.3e7, weight_bytes=2, cached_bytes=147_456)"""

    parameters: float
    trained: float  # those of the adapter
    weight_bytes: float  # of one parameter
    cached_bytes: float  # keys and values of one token


class Efficiency(NamedTuple):
    """The share of a machine's peak that is reached: of its operations, of its bandwidth, of its operations."""

    prefill: float
    decode: float
    training: float


# of a GPU where nothing was measured on one. Training: Llama 3 reached 0.38 to 0.43 on H100s, with larger models
# (arXiv:2407.21783, table 4). Decoding: Databricks, "LLM Inference Performance Engineering", 2023. Prefill: a guess.
ASSUMED = Efficiency(prefill=0.5, decode=0.6, training=0.35)


class ScalingRow(NamedTuple):
    gpus: int
    seconds: float  # per step
    usd: float  # per step
    share: float  # of the steps per hour that as many times one machine would make; 1.0 in the first row
    bottleneck: str


def find_machine(name: str) -> MachineSpec:
    """Returns the machine of that name. Raises UsageError if there is none."""
    facts = yaml.safe_load((packaged("configs") / "machines.yaml").read_text())
    machines = msgspec.convert(facts, dict[str, MachineSpec])
    if name not in machines:
        near = difflib.get_close_matches(name, machines, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"no machine {name!r}; {hint}There are: {', '.join(machines)}")
    return machines[name]


def efficiency(rates: Rates, machine: MachineSpec, model: ModelSize) -> Efficiency:
    """Returns the efficiency behind measured rates. A model too small for the machine has a low one."""
    prefill, training = (n * model.parameters / machine.flops for n in (2, 6))  # operations per token and parameter
    decode = model.parameters * model.weight_bytes / machine.bandwidth
    times = (rates.prompt_token_s, rates.pass_s, rates.trained_token_s)
    return Efficiency(*(best / max(time, best) for best, time in zip((prefill, decode, training), times, strict=True)))


def scaled(rates: Rates, here: MachineSpec, there: MachineSpec, model: ModelSize) -> Rates:
    """Returns the rates of one GPU there. Agents, calls, judge and the rest of a step take as long as here.

    The same kind of machine keeps the efficiency that was measured here; another kind has the assumed one. Raises
    UsageError: the weights do not fit in the memory of one GPU.
    """
    weights = model.parameters * model.weight_bytes
    if weights > ROOM * there.memory:
        raise UsageError(f"weights of {weights / 1e9:.0f} GB are too many for one GPU of {there.memory / 1e9:.0f} GB")
    exchange_s = 2 * (4 * model.trained + weights) / there.link  # gradients in float32; the weights of FSDP, twice
    if here.kind == there.kind:
        compute, memory = here.flops / there.flops, here.bandwidth / there.bandwidth
        names = {"prompt_token_s": compute, "trained_token_s": compute, "update_s": compute}
        names |= dict.fromkeys(("pass_s", "sequence_s", "cached_token_s"), memory)
        return rates._replace(**{n: f * getattr(rates, n) for n, f in names.items()}, exchange_s=exchange_s)
    bandwidth = there.bandwidth * ASSUMED.decode
    token_s = 2 * model.parameters / there.flops / ASSUMED.prefill
    return rates._replace(
        prompt_token_s=token_s,
        pass_s=max(weights / bandwidth, PASS_FLOOR_S),
        sequence_s=token_s,
        cached_token_s=model.cached_bytes / bandwidth,
        trained_token_s=6 * model.parameters / there.flops / ASSUMED.training,
        exchange_s=exchange_s,
    )


def layout_on(gpus: int, workload: Workload, layout: Layout) -> Layout:
    """Returns the layout with a replica and a learner process on each GPU, and as many attempts as have room there."""
    attempts = workload.groups_per_step * max(len(group.plays) for group in workload.groups)
    concurrency = min(attempts, layout.slots * gpus)
    return layout._replace(concurrency=concurrency, replicas=gpus, learners=gpus, is_shared=layout.max_staleness > 0)


def where_it_stops(
    workload: Workload, rates: Rates, machine: MachineSpec, layout: Layout | None = None
) -> list[ScalingRow]:
    """Returns a row for 1, 2, 4, ... 1,000 of the machine's GPUs. `rates` are of one of them, `layout` of the run."""
    rows = list[ScalingRow]()
    for gpus in [2**power for power in range(10)] + [MAX_GPUS]:
        slower = machine.link / machine.network if gpus > NODE else 1.0
        there = rates._replace(exchange_s=rates.exchange_s * slower)
        [times] = simulate(workload, there, layout_on(gpus, workload, layout or Layout()), steps=1)
        parts = dict(zip(("generation", "judge", "training", "publish"), times[:4], strict=True))
        bottleneck = max(parts, key=lambda name: parts[name])
        if bottleneck == "generation":
            bottleneck = _within_generation(workload, rates, layout or Layout(), times.sampling_s)
        share = rows[0].seconds / (gpus * times.total_s) if rows else 1.0
        rows.append(
            ScalingRow(gpus, times.total_s, gpus * machine.usd_per_hour * times.total_s / 3600, share, bottleneck)
        )
    return rows


def _within_generation(workload: Workload, rates: Rates, layout: Layout, sampling_s: float) -> str:
    """Returns what takes half of the time by itself, however many replicas there are, or "generation"."""
    plays = [play for group in workload.groups for play in group.plays]
    waves = [calls for play in plays for calls in play.waves]
    steps = len(workload.groups) / workload.groups_per_step  # as many as the groups are of
    parts = {
        "tail of generation": longest_alone(workload, rates),
        "gateway": rates.call_s * sum(map(len, waves)) / steps,
        "agents": rates.agent_s * (len(waves) + len(plays)) / steps / layout.agents,
    }
    most = max(parts, key=lambda name: parts[name])
    return most if parts[most] > 0.5 * sampling_s else "generation"


def longest_alone(workload: Workload, rates: Rates) -> float:
    """Returns the seconds of the longest attempt on a machine that plays nothing else, with warm caches."""
    pass_s = rates.pass_s + rates.sequence_s
    return max(
        play.end_s
        + math.fsum(
            calls[0].wait_s + max(call.sampled for call in calls) * pass_s + calls[0].prompt * rates.prompt_token_s
            for calls in play.waves
        )
        for group in workload.groups
        for play in group.plays
    )
