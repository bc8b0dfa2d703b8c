"""The learner in several processes: the gradient is that of one, and a dead process ends the run at once."""

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from art_cli.config.schema import (
    AlgorithmConfig,
    DistillConfig,
    DrGrpoConfig,
    GrpoConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    PpoConfig,
    SftConfig,
    TeacherConfig,
    TorchLearnerConfig,
    TrainConfig,
)
from art_cli.learners import LearnerSetup
from art_cli.learners.packs.packing import PACK_COST, pack_samples
from art_cli.learners.packs.ranks import deal, pack_evenly
from art_cli.learners.processes import workers as workers_module
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.workers import ParallelLearner, Watchdog, Workers
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.loading import load_weights
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import LearnedTrajectory, ScoredTrajectory
from art_cli.runtime.errors import DriftError, LearnerError
from art_cli.runtime.processes.process_calls import Advance, Heartbeat, Returned
from tests.learners.test_streams import NAMES, STREAMS
from tests.learners.test_user_algorithm import MINE
from tests.letters.build import build
from tests.support.models.warm_up import warm_up
from tests.support.paths import ROOT
from tests.support.processes.process_table import is_alive
from tests.support.records.trees import sampled, samples_of, scored, turn, turn_trees

ADAPTER, MODEL, MOMENTS = "adapter_model.safetensors", "model.safetensors", "optimizer.safetensors"
DEMOS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": n * 4}]} for n in "abcde"
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build(directory)
    (directory / "mine.py").write_text(MINE)
    return directory


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Workers]]:
    """The newest pair of processes, if a test has asked for one."""
    pool: list[Workers] = []
    yield pool
    for workers in pool:
        workers.close()


@pytest.fixture
def workers(pool: list[Workers], tmp_path_factory: pytest.TempPathFactory) -> Workers:
    """Two processes that serve one test after the other, until one kills them."""
    if pool and not all(is_alive(pid) for pid in pool[0].pids.values()):
        pool.pop().close()
    if not pool:
        pool.append(Workers(2, logs=tmp_path_factory.mktemp("logs")))
    return pool[0]


def job(base: Path, *, lora: bool = True, loss: LossConfig | AlgorithmConfig | None = None, **knobs: object) -> Job:
    shape = {name: knobs.pop(name) for name in list(knobs) if name in TorchLearnerConfig.model_fields}
    return Job(
        base=str(base),
        model=ModelConfig(base=str(base), lora=LoraConfig(rank=4, alpha=8) if lora else None),
        train=TrainConfig(**{"learning_rate": 1e-3, "epochs_per_step": 1, "max_logprob_gap": 100.0, **knobs}),
        loss=loss or GrpoConfig(),
        learner=TorchLearnerConfig(**{"processes": 2, "micro_batch_tokens": 60, **shape}),
        sft=SftConfig(demos="", batch_size=2, patience=1),
        sampling_max_tokens=16,
        directory=base,
    )


def alone(job: Job) -> TorchLearner:
    """The same learner in this process."""
    weights = load_weights(job.model, job.base, device="cpu", seed=job.train.seed)
    return TorchLearner(
        weights,
        LearnerSetup(
            train=job.train,
            loss=job.loss,
            learner=job.learner,
            sft=job.sft,
            sampling_max_tokens=job.sampling_max_tokens,
            directory=job.directory,
        ),
    )


def played(base: Path, *, seed: int = 0) -> list[list[ScoredTrajectory]]:
    """3 groups of 4 attempts of uneven length, of two turns, as an older policy sampled them."""
    return [list(group) for group in _played(base, seed)]


@functools.cache
def _played(base: Path, seed: int) -> list[list[ScoredTrajectory]]:
    draw = np.random.default_rng(seed)
    weights = load_weights(ModelConfig(base=str(base), lora=None), str(base), device="cpu")

    def attempt(prompt: list[int]) -> list[object]:
        first, more, second = (draw.integers(3, 250, draw.integers(1, 16)).tolist() for _ in range(3))
        turns = [turn(prompt, first), turn(more, second, parent=0, kept=len(prompt) + len(first))]
        return sampled(weights, turns, noise=0.3, seed=int(draw.integers(1000)))

    made = []
    for group in range(3):
        prompt = draw.integers(3, 250, 12 * (group + 1)).tolist()
        made.append([scored(attempt(prompt), float(draw.normal()), index=i, group=f"g{group}") for i in range(4)])
    return made


def started(base: Path, directory: Path, *, lora: bool = True) -> Path:
    """A checkpoint whose adapter is not the fresh one, which changes nothing and has no gradient for A."""
    learner = alone(job(base, lora=lora))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    path = directory / "start"
    path.mkdir()
    learner.save(path)
    return path


def saved(learner: TorchLearner | ParallelLearner, path: Path) -> Path:
    path.mkdir()
    learner.save(path)
    return path


def distance(one: Path, other: Path, *, kind: str = "") -> float:
    """|one - other| / |one| over all tensors of two files whose name ends in `kind`, taken as one vector."""
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    names = [name for name in left if name.endswith(kind)]
    assert names
    vectors = [torch.cat([tensors[name].double().flatten() for name in names]) for tensors in (left, right)]
    return float((vectors[0] - vectors[1]).norm() / vectors[0].norm())


def check_alike(one: Sequence[LearnedTrajectory], other: Sequence[LearnedTrajectory]) -> None:
    """Whether they say the same of the same trajectories, but for rounding."""
    assert [line.id for line in one] == [line.id for line in other] and len(one) == 12
    for left, right in zip(one, other, strict=True):
        assert (left.num_tokens, left.masked, left.left_out) == (right.num_tokens, right.masked, right.left_out)
        for name in ("advantages", "logprobs", "reference", "importance"):
            numbers = [_numbers(getattr(line, name)) for line in (left, right)]
            np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-4, err_msg=name)
        assert left.loss == pytest.approx(right.loss, rel=1e-3, abs=1e-5)


def _numbers(value: object) -> list[float]:
    """All numbers of a nested list; NaN for None."""
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [float("nan") if value is None else float(value)]  # type: ignore[arg-type]


# --- the gradient -----------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, object]] = {
    "trees": {},
    "rows": {"packing": "rows"},
    "one pack in each process": {"micro_batch_tokens": 10_000},
    "kl, importance, three updates": {
        "loss": GrpoConfig(kl=0.1, off_policy={"name": "icepop", "low": 0.9, "high": 1.5}),
        "updates_per_step": 3,
        "micro_batch_tokens": 100,
    },
    "checkpointed layers": {"gradient_checkpointing": True, "loss": DrGrpoConfig(name="dr_grpo")},
    "all weights": {"lora": False},
    "trust region": {"updates_per_step": 2, "max_kl": 1e-6, "loss": GrpoConfig(mean_over="all")},
    "every component": {"loss": AlgorithmConfig(entry=STREAMS, options={"components": NAMES})},
    "a teacher": {"loss": DistillConfig(name="distill", teacher=TeacherConfig(model="."), reward_weight=0.5)},
    "a critic that moves the trunk": {
        "loss": PpoConfig(name="ppo", value_trunk=True),
        "updates_per_step": 2,
    },
    "a critic, as plain rows": {"loss": PpoConfig(name="ppo"), "packing": "rows", "gradient_checkpointing": True},
    "a user's algorithm": {
        "loss": AlgorithmConfig(entry="mine.py:Mine", options={"scale": 2.0}, off_policy={"name": "truncate"})
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradient_and_the_metrics_of_one(
    case: str, base: Path, workers: Workers, tmp_path: Path
) -> None:
    """After one update AdamW's first moment is (1 - beta1) times the clipped gradient: so gradients are compared.

    Packs of 60 tokens do not come out even, so that one process runs an idle pack.
    """
    knobs = dict(CASES[case])
    setup = job(base, **knobs)
    start = started(base, tmp_path, lora=bool(knobs.get("lora", True)))
    groups = played(base)
    one, two = alone(setup), ParallelLearner(setup, workers)
    metrics = []
    for learner in (one, two):
        learner.load(start)
        metrics.append(learner.step(groups).known())
        learner.write_learned(tmp_path / f"learned-{len(metrics)}")
    check_alike(*(list(read_lines(tmp_path / f"learned-{number}", LearnedTrajectory)) for number in (1, 2)))
    first, second = saved(one, tmp_path / "one"), saved(two, tmp_path / "two")
    assert distance(first / MOMENTS, second / MOMENTS, kind=":exp_avg") < 1e-5
    assert distance(first / MOMENTS, second / MOMENTS) < 1e-5
    if isinstance(setup.loss, PpoConfig):
        for file in (f"critic/{MOMENTS}", "critic/value_head.safetensors"):
            assert distance(first / file, second / file) < 1e-5
    weights = MODEL if setup.model.lora is None else ADAPTER
    assert distance(first / weights, second / weights) < 1e-5
    for name in metrics[0].keys() - {"train_s", "tokens_computed"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5, abs=1e-6), name
    assert metrics[1].keys() == metrics[0].keys()
    assert one.score(range(3, 40)) == pytest.approx(two.score(range(3, 40)), abs=1e-4)


def test_the_distance_would_show_a_gradient_that_is_a_mean_instead_of_a_sum(base: Path, tmp_path: Path) -> None:
    """Half the gradient, below the clip: a relative distance of 1/2, five orders above the bound."""
    learner = alone(job(base))
    learner.step(played(base))
    path = saved(learner, tmp_path / "one")
    (tmp_path / "two").mkdir()
    halved = {name: tensor / 2 for name, tensor in load_file(path / MOMENTS).items()}
    save_file(halved, tmp_path / "two" / MOMENTS)
    assert distance(path / MOMENTS, tmp_path / "two" / MOMENTS, kind=":exp_avg") == pytest.approx(0.5)


@pytest.mark.slow
def test_demos_train_the_same_in_two_processes(base: Path, workers: Workers, tmp_path: Path) -> None:
    setup = job(base)
    one, two = alone(setup), ParallelLearner(setup, workers)
    numbers = [warm_up(learner, DEMOS[1:], DEMOS[:1]) for learner in (one, two)]
    assert distance(saved(one, tmp_path / "one") / ADAPTER, saved(two, tmp_path / "two") / ADAPTER) < 1e-4
    for name in ("loss", "loss_first", "eval_loss", "eval_loss_best", "grad_norm", "num_updates", "tokens_trained"):
        assert numbers[1][name] == pytest.approx(numbers[0][name], rel=1e-4), name


# --- packs against rows -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_batch_is_compared_in_all_processes(base: Path, workers: Workers) -> None:
    ParallelLearner(job(base), workers).step(played(base))
    for rank in range(2):
        assert "packs hold against plain rows" in (workers.logs / f"learner_{rank}.log").read_text()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_either_goes_on_from_the_others_checkpoint(base: Path, workers: Workers, tmp_path: Path) -> None:
    """A step in one process, the next in two, and the other way round: both as two steps in one process."""
    setup = job(base)
    batches = [played(base, seed=seed) for seed in (1, 2)]
    whole = alone(setup)
    for batch in batches:
        whole.step(batch)
    reference = saved(whole, tmp_path / "whole")

    def alike(learner: str) -> TorchLearner | ParallelLearner:
        return alone(setup) if learner == "one" else ParallelLearner(setup, workers)

    for before, after in (("one", "two"), ("two", "one")):
        learner = alike(before)
        learner.step(batches[0])
        halfway = saved(learner, tmp_path / f"{before}, halfway")
        learner = alike(after)
        learner.load(halfway)
        learner.step(batches[1])
        path = saved(learner, tmp_path / f"{before}, {after}")
        assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in reference.iterdir())
        assert distance(reference / MOMENTS, path / MOMENTS) < 1e-5
        assert distance(reference / ADAPTER, path / ADAPTER) < 1e-5


@pytest.mark.slow
def test_what_is_loaded_is_saved_again_bit_by_bit(base: Path, workers: Workers, tmp_path: Path) -> None:
    learner = alone(job(base))
    learner.step(played(base))
    first = saved(learner, tmp_path / "first")
    parallel = ParallelLearner(job(base), workers)
    parallel.load(first)
    again = saved(parallel, tmp_path / "again")
    for name in (ADAPTER, MOMENTS, "optimizer.json", "rng.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name


# --- failures of a step -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_process_ends_the_step_in_both_and_changes_nothing(
    base: Path, workers: Workers, tmp_path: Path
) -> None:
    """One token that the engine says was impossible makes its ratio infinite: exp(0 + 1000)."""
    groups = played(base)
    bad = groups[1][2]
    turns = [*bad.turns]
    turns[0] = msgspec.structs.replace(turns[0], logprobs=[-1000.0] * len(turns[0].sampled_ids))
    groups[1][2] = msgspec.structs.replace(bad, turns=turns, reward=-9.0)
    learner = ParallelLearner(job(base), workers)
    before = saved(learner, tmp_path / "before")
    with pytest.raises(LearnerError, match="g1/2.*not finite"):
        learner.step(groups)
    after = saved(learner, tmp_path / "after")
    assert (before / ADAPTER).read_bytes() == (after / ADAPTER).read_bytes()
    assert learner.step(played(base)).num_updates == 1


@pytest.mark.slow
def test_drift_is_found_over_all_processes(base: Path, workers: Workers) -> None:
    """The logprobs carry noise of 0.3 nats a token, on either side of what the bound lets pass."""
    learner = ParallelLearner(job(base, max_logprob_gap=0.01), workers)
    with pytest.raises(DriftError, match="max_logprob_gap = 0.01"):
        learner.step(played(base))


# --- dealing ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(turn_trees(3), min_size=1, max_size=12), st.integers(2, 5), st.integers(4, 60), st.booleans())
def test_every_sample_is_dealt_once_and_every_process_runs_as_many_packs(
    trees: list[list[object]], size: int, budget: int, share: bool
) -> None:
    samples = [sample for index, turns in enumerate(trees) for sample in samples_of(scored(turns, 0.0, index=index))]
    packs = pack_evenly(samples, size, budget=budget, share=share)
    dealt = [deal(packs, rank, size) for rank in range(size)]
    assert len({len(mine) for mine in dealt}) == 1
    names = sorted((s.trajectory_id, s.turn) for mine in dealt for pack in mine for s in pack.samples)
    assert names == sorted((sample.trajectory_id, sample.turn) for sample in samples)
    for pack in (pack for mine in dealt for pack in mine):
        longest = max((len(sample.token_ids) for sample in pack.samples), default=2)
        assert len(pack.token_ids) <= max(budget, longest)
        assert len(pack.edges.targets) > 0, "an idle pack still runs the head"

    def duration(packs: list[object]) -> int:
        lengths = sorted((len(pack.token_ids) for pack in packs), reverse=True)
        return sum(length + PACK_COST for length in lengths[::size])

    assert duration(packs) <= duration(pack_samples(samples, budget=budget, share=share))


# --- the last steps of the shared processes ---------------------------------------------------------------------------

BREAK = f"""
import os, sys
import pytest
sys.path.append({str(ROOT)!r})
if "RANK" in os.environ:
    from tests.learners.test_packing_check import break_backward
    break_backward(pytest.MonkeyPatch())
"""


@pytest.mark.slow
def test_packs_with_a_wrong_gradient_lose_in_all_processes(base: Path, workers: Workers, tmp_path: Path) -> None:
    """Rows from the first batch on, with the gradient of one process that is right.

    The algorithm's file breaks the packs of the processes that read it, for as long as they live.
    """
    (base / "broken.py").write_text(BREAK + MINE)
    right, wrong = (job(base, loss=AlgorithmConfig(entry=f"{name}.py:Mine")) for name in ("mine", "broken"))
    one, two = alone(right), ParallelLearner(wrong, workers)
    start, groups = started(base, tmp_path), played(base)
    one.load(start)
    two.load(start)
    one.step(groups)
    metrics = two.step(groups)
    for rank in range(2):
        assert "packs do not hold against plain rows" in (workers.logs / f"learner_{rank}.log").read_text()
    assert metrics.tokens_computed == metrics.tokens_flat
    first, second = saved(one, tmp_path / "one"), saved(two, tmp_path / "two")
    assert distance(first / MOMENTS, second / MOMENTS, kind=":exp_avg") < 1e-5


# --- death ------------------------------------------------------------------------------------------------------------


def warmed_up(base: Path, workers: Workers) -> ParallelLearner:
    """A learner whose processes have answered once and live."""
    learner = ParallelLearner(job(base), workers)
    learner.score([1, 2, 3])
    learner.check()
    return learner


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_says_so(base: Path, workers: Workers) -> None:
    """Stopped first, so that it dies in the middle of a step that the other waits in. `check` sees it as well."""
    learner = warmed_up(base, workers)
    victim, other = workers.pids[1], workers.pids[0]
    os.kill(victim, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    begin = time.monotonic()
    with pytest.raises(LearnerError, match="learner process 1 of 2 died .killed by SIGKILL.*same command"):
        learner.step(played(base))
    assert time.monotonic() - begin < 30
    with pytest.raises(LearnerError, match="process 1 .*SIGKILL"):
        learner.check()
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
    learner.close()


@pytest.mark.slow
def test_a_process_that_hangs_ends_them_all_and_is_named(
    base: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, stopped in the middle of a step that the other waits in: that one goes on saying that it runs."""
    monkeypatch.setattr(workers_module, "HUNG_S", 15.0)
    learner = warmed_up(base, workers)
    victim, other = workers.pids[1], workers.pids[0]
    os.kill(victim, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(LearnerError, match="learner process 1 hangs.*5 s.*same command"):
        learner.step(played(base))
    assert time.monotonic() - begin < 30
    learner.close()
    begin = time.monotonic()
    while any(is_alive(pid) for pid in (victim, other)):
        assert time.monotonic() - begin < 10
        time.sleep(0.02)


HANG = "the learner's processes hang: they have done nothing for {} s"


class Clock:
    """Stands until it is told to go on, in steps as small as those in which it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def passed(watchdog: Watchdog, clock: Clock, seconds: float, *, beating: Sequence[int] = ()) -> str | None:
    """What is wrong after some time in which those processes say that they run, and nothing more."""
    for _ in range(round(seconds / 0.25)):
        clock.now += 0.25
        for rank in beating:
            watchdog.hear(f"process {rank}", Heartbeat())
    return watchdog.problem()


def test_processes_that_run_and_do_nothing_hang_after_ten_times_the_longest_pack() -> None:
    """The first pack comes after 8 s, the next one after 4: 10 x 8 s; before the first one there are 900."""
    clock = Clock()
    watchdog = Watchdog(["process 0", "process 1"], 60.0, clock)
    assert passed(watchdog, clock, 890, beating=[0, 1]) is None
    assert (
        passed(watchdog, clock, 11, beating=[0, 1]) == "the learner's processes hang: they have done nothing for 900 s"
    )
    watchdog = Watchdog(["process 0", "process 1"], 60.0, clock)
    for seconds in (8, 4):
        assert passed(watchdog, clock, seconds, beating=[0, 1]) is None
        watchdog.hear("process 0", Advance(1, 1, 9))
    assert passed(watchdog, clock, 79, beating=[0, 1]) is None
    assert passed(watchdog, clock, 2, beating=[0, 1]) == HANG.format(80)


def test_a_process_that_does_not_beat_is_named_whatever_the_others_do() -> None:
    clock = Clock()
    watchdog = Watchdog(["process 0", "process 1"], 60.0, clock)
    assert passed(watchdog, clock, 59, beating=[0]) is None
    assert passed(watchdog, clock, 2, beating=[0]) == ("learner process 1 hangs: it lives, and has not moved for 60 s")


def test_quick_packs_leave_a_minute_and_who_has_answered_may_be_silent() -> None:
    clock = Clock()
    watchdog = Watchdog(["process 0", "process 1"], 60.0, clock)
    passed(watchdog, clock, 1)
    watchdog.hear("process 0", Advance(1, 1, 9))
    watchdog.hear("process 1", Returned(1, None))
    assert passed(watchdog, clock, 59, beating=[0]) is None
    assert passed(watchdog, clock, 2, beating=[0]) == HANG.format(60)


def test_time_in_which_the_owner_was_stopped_itself_does_not_count() -> None:
    clock = Clock()
    watchdog = Watchdog(["process 0"], 60.0, clock)
    clock.now += 10_000
    assert watchdog.problem() is None
