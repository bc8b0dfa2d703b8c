"""Machines: facts from configs/machines.yaml, a run's rates on another machine, and the useful number of GPUs.

Prompts and updates scale with operations per second, decoding with memory bandwidth. docs/check.md lists the
assumptions.
"""

import difflib
import math
import os
import re
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
import yaml

from art_cli.config.compose import LoadedConfig
from art_cli.config.packaged import packaged
from art_cli.config.schema import RunConfig
from art_cli.loop.calibration import MAX_SLOTS, Calibration, calibrate, finished_steps
from art_cli.loop.simulation import Rates, RunLayout, StepTimes, longest_alone, simulate
from art_cli.models.base_source import find_base
from art_cli.models.precision import gpu_name
from art_cli.models.run_memory import model_size
from art_cli.models.saved_weights import ADAPTER_FILE, MODEL_FILE
from art_cli.reports.pages.elsewhere_text import Elsewhere, ScalingRow
from art_cli.runs.promise import Promise
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError

NUM_STEPS = 2  # finished steps to simulate; more steps take time and add little
MAX_GPUS = 1000
NODE = 8  # GPUs connected by NVLink
ROOM = 0.6  # share of a GPU's memory for weights; the rest is for keys, values and activations
PASS_FLOOR_S = 0.004  # minimum duration of a pass on a GPU: launches and sampling (assumed)
# words in the names of different GPUs with the same number
OTHER_CARDS = {"ti", "d", "super", "laptop", "nvl", "pcie", "mig"}
WORTH = 0.9  # more GPUs add little if a step still takes this share of the time or more
# Assumed shares of peak performance for unmeasured machines. Training: Llama 3 reached 0.38 to 0.43 on H100s, with
# larger models (arXiv:2407.21783, table 4). Prompts and decoding: guesses.
PREFILL, DECODE, TRAINING = 0.5, 0.6, 0.35


class MachineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine. The numbers are for one GPU or for the whole CPU; units are in configs/machines.yaml."""

    kind: Literal["cpu", "gpu"]
    flops: float
    bandwidth: float
    memory: float = math.inf
    usd_per_hour: float | None = None  # None if unknown
    link: float = math.inf
    network: float = math.inf
    cores: int = 0
    named: str = ""  # words in the GPU's CUDA name

    def is_called(self, name: str) -> bool:
        """Matches CUDA's name for a GPU. Example: "NVIDIA L40S" is not an L4, "NVIDIA H100 PCIe" is not SXM."""
        words, named = set(re.split(r"[\s-]+", name.lower())), set(self.named.lower().split())
        return bool(named) and named <= words and not (words - named) & OTHER_CARDS


class PolicySize(NamedTuple):
    """Example: PolicySize(parameters=4e9, weight_bytes=8e9, cached_bytes=147_456, exchanged_bytes=1.6e10)"""

    parameters: float
    weight_bytes: float
    cached_bytes: float  # keys and values per token
    exchanged_bytes: float  # bytes exchanged by learner processes in an update: gradients in float32, weights of FSDP


class Chosen(NamedTuple):
    """Example: Chosen("h100x8", MachineSpec(...), 8)"""

    name: str
    machine: MachineSpec
    most: int  # largest number of GPUs


def choose_machines(loaded: LoadedConfig, names: Sequence[str]) -> list[Chosen]:
    """Looks up machines by name. Raises UsageError for an unknown name, or if the run cannot be simulated."""
    train, learner = loaded.config.train, loaded.config.learner
    if not learner.trains_weights or learner.weights == "server":
        raise UsageError("--on: the weights are not on this machine, so its speed cannot be measured")
    if train.max_staleness:
        raise UsageError("--on: sampling during training is not simulated; plan with train.max_staleness=0")
    return [Chosen(name, *find_machine(name)) for name in names]


def elsewhere(loaded: LoadedConfig, promise: Promise, chosen: Sequence[Chosen]) -> list[Elsewhere]:
    """Returns the planned run on each machine. Raises DataError if the run's files cannot be measured."""
    config, found = loaded.config, promise.measured
    files = RunDir(config.runs / config.name)
    pilot = StepTimes(found.sampling_s + found.first_call_s, found.judging_s, found.training_s or 0.0, found.rest_s)
    finished = finished_steps(files, last=NUM_STEPS)
    num_groups = None if finished else len(found.group_tokens)
    known = calibrate(files, finished or {0: pilot}, num_groups=num_groups)
    here, base = _here(config), find_base(config.model.base, directory=loaded.directory, built=files.base)
    return [on_machine(promise, known, here, each, _size(files, config, base, each.machine)) for each in chosen]


def on_machine(
    promise: Promise, known: Calibration, here: MachineSpec | None, chosen: Chosen, size: PolicySize
) -> Elsewhere:
    """Returns the run on one machine. `known` was measured `here`."""
    name, machine, most = chosen
    if size.weight_bytes > ROOM * machine.memory:
        room = f"{ROOM:.0%} of one GPU's {machine.memory / 1e9:.0f} GB, which they may take"
        return Elsewhere(name, f"weights of {size.weight_bytes / 1e9:.1f} GB do not fit into {room}")
    rates, basis = carry(known.rates, here, machine, size)
    numbers = sorted({most, *(2**power for power in range(10) if 2**power < most)})
    rows = scale(promise, known._replace(rates=rates), machine, size, numbers)
    return Elsewhere(name, basis, rows, stops_at(rows))


# --- the machines -----------------------------------------------------------------------------------------------------


def read_machines() -> dict[str, MachineSpec]:
    facts = yaml.safe_load((packaged("configs") / "machines.yaml").read_text())
    return msgspec.convert(facts, dict[str, MachineSpec])


def find_machine(name: str) -> tuple[MachineSpec, int]:
    """Returns the machine and its largest number of GPUs: 8 for "h100x8". Raises UsageError for an unknown name."""
    machines, match = read_machines(), re.fullmatch(r"(.+?)(?:x([1-9]\d{0,3}))?", name)
    plain, most = (match[1], int(match[2] or 0)) if match else (name, 0)
    machine = machines.get(plain)
    if machine is None or most > (MAX_GPUS if machine.kind == "gpu" else 0):
        hint = "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(plain, machines, 1, 0.5))
        listed = f"there are {', '.join(machines)}; h100x8 is 8 GPUs, of at most {MAX_GPUS:,}"
        raise UsageError(f"--on {name}: no such machine; {hint}{listed}")
    return machine, most or (MAX_GPUS if machine.kind == "gpu" else 1)


def _here(config: RunConfig) -> MachineSpec | None:
    """Returns this machine; None for an unknown GPU. CPU numbers scale the table's laptop by the number of cores."""
    machines = read_machines()
    if name := "" if getattr(config.learner, "device", "") == "cpu" else gpu_name():
        return next((each for each in machines.values() if each.is_called(name)), None)
    laptop, cores = machines["laptop"], os.cpu_count() or 1
    share = cores / laptop.cores
    return MachineSpec("cpu", share * laptop.flops, share * laptop.bandwidth, cores=cores)


def _size(files: RunDir, config: RunConfig, base: str, machine: MachineSpec) -> PolicySize:
    size, start = model_size(base), files.checkpoint_path(0)
    weights = size.parameters * (4 if machine.kind == "cpu" else 0.5 if config.model.quantize == "4bit" else 2)
    saved = [path for path in (start / ADAPTER_FILE, start / MODEL_FILE) if path.is_file()]  # trained weights, float32
    updates = config.train.epochs_per_step * config.train.updates_per_step
    exchanged = 2 * updates * (weights + sum(path.stat().st_size for path in saved))
    return PolicySize(size.parameters, weights, 2 * size.cached_per_token, exchanged)


def carry(rates: Rates, here: MachineSpec | None, there: MachineSpec, size: PolicySize) -> tuple[Rates, str]:
    """Returns the rates for a GPU (or the CPU) of another machine, and explains their basis.

    Machines of the same kind keep the measured efficiency; other kinds get assumed efficiencies. Agents, calls, judge
    and the rest of a step take the same time as here.
    """
    rates = rates._replace(exchange_s=size.exchanged_bytes / there.link)
    if here is not None and here.kind == there.kind:
        compute, memory = here.flops / there.flops, here.bandwidth / there.bandwidth
        names = dict.fromkeys(("prompt_token_s", "trained_token_s"), compute)
        names |= dict.fromkeys(("pass_s", "sequence_s", "cached_token_s"), memory)
        cores = f"{there.cores} cores, each assumed to be as fast as one of the {here.cores} here"
        peaks = f"{1 / compute:.2g} times the operations and {1 / memory:.2g} times the bandwidth of a GPU here"
        basis = f"as efficient as what was measured here, with {cores if there.kind == 'cpu' else peaks}"
        return rates._replace(**{name: factor * getattr(rates, name) for name, factor in names.items()}), basis
    bandwidth, token_s = DECODE * there.bandwidth, 2 * size.parameters / there.flops
    assumed = rates._replace(
        prompt_token_s=token_s / PREFILL,
        pass_s=max(size.weight_bytes / bandwidth, PASS_FLOOR_S if there.kind == "gpu" else 0.0),
        sequence_s=token_s / PREFILL,
        cached_token_s=size.cached_bytes / bandwidth,
        trained_token_s=3 * token_s / TRAINING,
    )
    shares = f"{PREFILL:.0%} of its operations for prompts, {TRAINING:.0%} in training, {DECODE:.0%} of its bandwidth"
    return assumed, f"assumed, because no such machine was measured: {shares} for replies"


# --- where more of them stop helping ----------------------------------------------------------------------------------


def scale(
    promise: Promise, known: Calibration, machine: MachineSpec, size: PolicySize, numbers: Sequence[int]
) -> list[ScalingRow]:
    """Returns a row for each number of GPUs. `known` contains single-GPU rates."""
    rows, found = list[ScalingRow](), promise.measured
    sampled_s = fmean(each.sampling_s for each in known.times)
    for num in numbers:
        layout = _layout_on(num, known, machine, size)
        slower = machine.link / machine.network if num > NODE else 1.0
        rates = known.rates._replace(exchange_s=known.rates.exchange_s * slower)
        simulated = [simulate(step, rates, layout) for step in known.steps]
        times = StepTimes(*(fmean(part) for part in zip(*simulated, strict=True)))
        evaluating_s = promise.expected["evaluating"].value * times.sampling_s / max(sampled_s, 1e-9)
        run_s = found.start_s + found.first_call_s + promise.steps * sum(times) + evaluating_s
        usd = None
        if found.judge_usd is not None and machine.usd_per_hour is not None:
            rent = num * machine.usd_per_hour * run_s / 3600
            usd = (promise.steps + promise.contested) * found.judge_usd + rent
        first_s = rows[0].num * rows[0].step_s if rows else num * sum(times)
        share = first_s / max(num * sum(times), 1e-9)
        rows.append(ScalingRow(num, sum(times), run_s, usd, share, _limit(known, rates, layout, times)))
    return rows


def _layout_on(num: int, known: Calibration, machine: MachineSpec, size: PolicySize) -> RunLayout:
    """Returns a layout with a replica and a learner process per GPU, and with concurrency limited by memory."""
    if machine.kind == "cpu":
        return known.layout._replace(replicas=1, learners=1)
    plays = [play for step in known.steps for play in step.plays]
    context = fmean(play.tokens for play in plays)
    room = (0.9 * machine.memory - size.weight_bytes) / max(size.cached_bytes * context, 1.0)
    slots = max(min(MAX_SLOTS, int(room)), 1)
    return known.layout._replace(concurrency=slots * num, replicas=num, slots=slots, learners=num)


def _limit(known: Calibration, rates: Rates, layout: RunLayout, times: StepTimes) -> str:
    """Returns a step's longest part. Generation is broken down if a single cause takes half the time."""
    parts = dict(zip(("generation", "judge", "training", "publishing"), times, strict=True))
    if (longest := max(parts, key=lambda name: parts[name])) != "generation":
        return longest
    calls = [play.calls for step in known.steps for play in step.plays]
    num_calls = sum(call.num for each in calls for call in each) / len(known.steps)
    num_waits = sum(len(each) + 1 for each in calls) / len(known.steps)
    idle = rates._replace(prompt_token_s=0.0, pass_s=0.0, sequence_s=0.0)  # an infinitely fast engine
    waits_s, longest_s = (fmean(longest_alone(step, each) for step in known.steps) for each in (idle, rates))
    within = {
        "agents": max(waits_s, rates.agent_s * num_waits / layout.agents),
        "gateway": rates.call_s * num_calls,
        "tail of generation": longest_s,
    }
    return next((name for name, seconds in within.items() if seconds > 0.5 * times.sampling_s), "generation")


def stops_at(rows: Sequence[ScalingRow]) -> int | None:
    """Returns the number of GPUs from which on a step gets less than 10 % faster, if there is such a number."""
    later = [(row, [each.step_s for each in rows[index:]]) for index, row in enumerate(rows, 1)]
    return next((row.num for row, seconds in later if seconds and min(seconds) > WORTH * row.step_s), None)
