"""`art plan --on`: the table of machines, rates carried over, where more GPUs stop helping, and the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.packaged import packaged_options
from art_cli.loop.calibration import Calibration
from art_cli.loop.machines import (
    DECODE,
    Chosen,
    MachineSpec,
    PolicySize,
    carry,
    find_machine,
    on_machine,
    read_machines,
)
from art_cli.loop.simulation import Play, PlayedCall, PlayedGroup, PlayedStep, Rates, RunLayout, simulate
from art_cli.reports.pages.elsewhere_text import Elsewhere, elsewhere_text
from art_cli.runs.promise import Measured, Promise, forecast
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from tests.support.paths import LETTERS

Art = Callable[..., tuple[int, str, str]]
SMALL = PolicySize(parameters=4e9, weight_bytes=8e9, cached_bytes=147_456, exchanged_bytes=16e9)
MEASURED = Rates(1e-3, 0.5, 0.02, 1e-6, call_s=0.001, agent_s=0.002, trained_token_s=5e-3, rest_s=0.1)
ON_GPU = Rates(2e-5, 0.005, 2e-5, 1e-8, call_s=0.001, agent_s=0.002, trained_token_s=2e-5, rest_s=0.1)
H100, LAPTOP = find_machine("h100")[0], find_machine("laptop")[0]


def run_on(
    changed: Rates = MEASURED,
    *,
    size: PolicySize = SMALL,
    sampled: int = 200,
    wait_s: float = 0.0,
    judge_s: float = 0.0,
    contested: float = 0.0,
    there: MachineSpec = H100,
) -> Elsewhere:
    """A run of 8 groups of 16 attempts, measured on H100s with these rates; a step's verdicts cost $2."""
    play = Play((PlayedCall(wait_s, 0, 500, sampled),), 0.0, 500 + sampled)
    step = PlayedStep((PlayedGroup((play,) * 16, judge_s),) * 8, 128 * 700)
    known = Calibration([step], [simulate(step, changed, RunLayout())], changed, RunLayout(judges=1), 1.0)
    found = Measured(group_tokens=[16 * sampled] * 8, num_attempts=128, sampling_s=1.0, judging_s=0.0, judge_usd=2.0)
    expected = forecast(found, steps=10, evaluations=0, eval_attempts=0, usd_per_hour=0)
    promise = Promise(config_hash="", measured=found, doubts=[], settings={}, reasons={}, steps=10, evaluations=0,
                      contested=contested, expected=expected)  # fmt: skip
    return on_machine(promise, known, H100, Chosen("h100", there, 1000), size)


def test_every_packaged_hardware_is_a_machine_and_others_are_named() -> None:
    for name in set(packaged_options("hardware")) - {"remote-tinker"}:  # remote
        machine, most = find_machine(name)
        assert machine.flops > machine.bandwidth and machine.link >= machine.network
        assert most == {"laptop": 1, "h100x8": 8}.get(name, 1000)
    with pytest.raises(
        UsageError, match=r"--on h10: no such machine; did you mean 'h100'\? there are laptop, gpu-24gb"
    ):
        find_machine("h10")
    for name in ("h100x0", "h100x1001", "laptopx2", "", "x8", "h100x99999999999999999999"):
        with pytest.raises(UsageError, match="no such machine"):
            find_machine(name)


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("NVIDIA L4", "gpu-24gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("", None),
    ],
)
def test_a_card_is_known_by_whole_words_of_its_name(name: str, machine: str | None) -> None:
    """An L40S has three times an L4's speed, and an H100 PCIe 0.76 of an SXM's."""
    found = [each for each, spec in read_machines().items() if spec.is_called(name)]
    assert found == ([] if machine is None else [machine])


def test_without_a_price_no_cost_is_shown() -> None:
    unpriced = run_on(there=find_machine("h200")[0])
    assert all(row.usd is None for row in unpriced.rows) and "unknown" in elsewhere_text([unpriced])
    assert all(row.usd for row in run_on().rows)


def test_the_same_kind_of_machine_keeps_the_measured_efficiency() -> None:
    """An L4 has 121 of 989 TFLOPS and 0.3 of 3.35 TB/s."""
    assert carry(MEASURED, H100, H100, SMALL)[0]._replace(exchange_s=0.0) == MEASURED
    there = carry(MEASURED, H100, find_machine("gpu-24gb")[0], SMALL)[0]
    for name in ("prompt_token_s", "trained_token_s"):
        assert getattr(there, name) == pytest.approx(getattr(MEASURED, name) * 989 / 121)
    for name in ("pass_s", "sequence_s", "cached_token_s"):
        assert getattr(there, name) == pytest.approx(getattr(MEASURED, name) * 3.35 / 0.3)
    assert (there.call_s, there.agent_s, there.rest_s) == (MEASURED.call_s, MEASURED.agent_s, MEASURED.rest_s)


def test_another_kind_has_the_assumed_efficiency_and_says_so() -> None:
    """8 GB of weights at 3.35 TB/s x 0.6: 4.0 ms; 2 x 4e9 operations a token at 989e12 x 0.5: 16 us; three times that
    for its training, at 0.35. So has a machine whose GPU is not in the table."""
    there, basis = carry(MEASURED, LAPTOP, H100, SMALL)
    assert there.pass_s == pytest.approx(8e9 / 3.35e12 / DECODE, abs=1e-4)
    assert there.prompt_token_s == pytest.approx(8e9 / 989e12 / 0.5)
    assert there.trained_token_s == pytest.approx(24e9 / 989e12 / 0.35)
    assert there.exchange_s == pytest.approx(16e9 / 4.5e11)
    assert basis.startswith("assumed") and carry(MEASURED, None, H100, SMALL) == (there, basis)


@pytest.mark.parametrize(
    ("of_group", "changed", "named"),
    [
        ({"wait_s": 100.0}, {}, "agents"),
        ({}, {"agent_s": 5.0}, "agents"),
        ({}, {"call_s": 5.0}, "gateway"),
        ({"judge_s": 500.0}, {}, "judge"),
        ({}, {"rest_s": 400.0}, "publishing"),
        ({"sampled": 20_000}, {}, "tail of generation"),
    ],
)
def test_the_limit_is_named_and_more_machines_only_cost_more(
    of_group: dict[str, Any], changed: dict[str, float], named: str
) -> None:
    found = run_on(ON_GPU._replace(**changed), **of_group)
    assert [row.num for row in found.rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    first, last = found.rows[0], found.rows[-1]
    assert last.limit == named and first.share == 1.0 and last.share < 0.05
    assert last.run_s == pytest.approx(10 * last.step_s) and last.usd == pytest.approx(20 + 2990 * last.run_s / 3600)
    assert (last.usd or 0.0) > (first.usd or 0.0) and (found.stops_at or 1000) < 1000


def test_verdicts_in_evaluations_are_paid_elsewhere_too() -> None:
    one, other = (run_on(ON_GPU, contested=each).rows[0] for each in (0.0, 5.0))
    assert other.usd == pytest.approx((one.usd or 0.0) + 5 * 2.0)


def test_what_can_be_divided_is_and_the_mark_follows_the_rows() -> None:
    """Nearly all of the step is generation and training: two and four GPUs halve and quarter it. Above the mark no
    row is 10 % faster, and below it one is."""
    found = run_on(ON_GPU._replace(pass_s=1e-5, sequence_s=1e-4, call_s=0.0, agent_s=0.0, rest_s=0.0), sampled=2000)
    assert [row.share for row in found.rows[:3]] == pytest.approx([1.0, 1.0, 1.0], abs=0.1)
    assert found.stops_at is not None
    at = next(row.step_s for row in found.rows if row.num == found.stops_at)
    for row in found.rows[:-1]:
        later = min(each.step_s for each in found.rows if each.num > row.num)
        assert later <= 0.9 * row.step_s if row.num < found.stops_at else later > 0.9 * at or row.num > found.stops_at
    assert f"above {found.stops_at:,} more add little" in elsewhere_text([found])


def test_a_model_that_no_gpu_holds_has_a_line_and_no_rows() -> None:
    found = run_on(size=SMALL._replace(parameters=7e10, weight_bytes=1.4e11))
    assert found.rows == [] and found.basis.startswith("weights of 140.0 GB do not fit into 60% of one GPU's 80 GB")
    assert len(elsewhere_text([found]).splitlines()) == 3, "an empty one, the title, and its own"


@pytest.mark.slow
def test_a_plan_goes_on_elsewhere(art: Art, tmp_path: Path) -> None:
    config, runs = LETTERS / "config.yaml", f"runs={tmp_path}"
    assert art("plan", config, runs, "--on", "h10")[0] == 2 and not (tmp_path / "letters").exists()
    code, out, _ = art("plan", config, runs, "--on", "h100", "--on", "laptop", "--on", "h100x2")
    run = RunDir(tmp_path / "letters")
    section = out[out.index("\nelsewhere?") :]
    assert code == 0 and section.count("assumed, because") == 2 and "as efficient as what was measured here" in section
    assert [line.split()[0] for line in section.splitlines() if line.strip()[:1].isdigit()] == [
        *("1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1,000"), "1", "1", "2",
    ]  # fmt: skip
    for each in run.trajectories(0):
        assert len(each.spans) == len(each.turns) == 2
        times = [time for span in each.spans for time in span]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= each.duration_s + 0.01

    played = run.trajectories_path(0).read_bytes()
    code, out, _ = art("plan", config, runs, "--on", "laptop", "--json")
    assert code == 0 and run.trajectories_path(0).read_bytes() == played
    [found] = json.loads(out)["elsewhere"]
    promise = json.loads(out)
    [row] = found["rows"]
    assert found["machine"] == "laptop" and row["num"] == 1 and 0 < row["step_s"] < 60 and row["usd"] == 0
    assert row["run_s"] > promise["steps"] * row["step_s"]

    promise = run.promise()
    assert promise is not None
    text = run.promise_path.read_text()
    run.promise_path.write_text(text.replace(f'"sampling_s": {promise.measured.sampling_s}', '"sampling_s": 1e300'))
    code, _, err = art("plan", config, runs)
    assert code == 1 and "promise.json" in err and "its numbers are not a plan's" in err
    run.promise_path.write_text(text)
    scored = run.scored_path(0).read_text()
    run.scored_path(0).write_text(scored.replace('"spans"', '"unknown"'))
    code, out, _ = art("plan", config, runs, "--on", "laptop")
    assert code == 0 and "has no call times: an older version played it" in out
    run.scored_path(0).write_text(scored)
    ahead = ("train.max_staleness=1", "loss.off_policy={name: truncate}")
    code, _, err = art("plan", config, runs, *ahead, "--on", "laptop")
    assert code == 2 and "sampling during training is not simulated; plan with train.max_staleness=0" in err
