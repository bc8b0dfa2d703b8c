"""Machines: the table, rates carried over by the roofline, and where more GPUs stop helping."""

import pytest

from art_cli.config.packaged import packaged_options
from art_cli.loop.machines import ASSUMED, ModelSize, find_machine, scaled, where_it_stops
from art_cli.loop.simulation import Layout, Play, PlayedCall, PlayedGroup, Rates, Workload
from art_cli.runtime.errors import UsageError

SMALL = ModelSize(parameters=4e9, trained=3e7, weight_bytes=2, cached_bytes=147_456)
MEASURED = Rates(1e-3, 0.5, 0.02, 1e-6, call_s=0.01, agent_s=0.002, trained_token_s=5e-3, update_s=1.0, rest_s=3.0)


def agents(num: int, sampled: int, wait_s: float = 0.0, judge_s: float = 0.0) -> Workload:
    group = PlayedGroup(tuple(Play(((PlayedCall(wait_s, 0, 500, 500, sampled),),)) for _ in range(16)), judge_s)
    return Workload((group,) * num, num)


def test_every_packaged_hardware_has_its_facts() -> None:
    for name in set(packaged_options("hardware")) - {"remote-tinker"}:  # that one is elsewhere
        machine = find_machine(name)
        assert machine.flops > machine.bandwidth > machine.network and machine.link >= machine.network
    assert find_machine("h100x8") == find_machine("h100x8") and find_machine("h100x8").gpus == 8
    assert find_machine("h100x8").flops == find_machine("h100").flops


def test_an_unknown_machine_is_named_with_those_that_there_are() -> None:
    with pytest.raises(
        UsageError, match=r"no machine 'h10'; did you mean 'h100'\? There are: laptop, gpu-24gb, h100, "
    ):
        find_machine("h10")


def test_a_machine_is_as_fast_as_itself() -> None:
    h100 = find_machine("h100")
    assert scaled(MEASURED, h100, h100, SMALL)._replace(exchange_s=0.0) == MEASURED


def test_on_the_same_kind_prompts_and_updates_scale_with_operations_and_passes_with_bandwidth() -> None:
    """An L4 has 121 of 989 TFLOPS and 0.3 of 3.35 TB/s."""
    there = scaled(MEASURED, find_machine("h100"), find_machine("gpu-24gb"), SMALL)
    for name in ("prompt_token_s", "trained_token_s", "update_s"):
        assert getattr(there, name) == pytest.approx(getattr(MEASURED, name) * 989 / 121)
    for name in ("pass_s", "sequence_s", "cached_token_s"):
        assert getattr(there, name) == pytest.approx(getattr(MEASURED, name) * 3.35 / 0.3)
    for name in ("call_s", "agent_s", "rest_s"):
        assert getattr(there, name) == getattr(MEASURED, name)


def test_on_another_kind_the_roofline_counts() -> None:
    """8 GB of weights at 3.35 TB/s x 0.6: 4.0 ms; 2 x 4e9 operations a token at 989e12 x 0.5: 16 us; three times that
    for its training, at 0.35."""
    there = scaled(MEASURED, find_machine("laptop"), find_machine("h100"), SMALL)
    assert there.pass_s == pytest.approx(8e9 / 3.35e12 / ASSUMED.decode, abs=1e-4)
    assert there.prompt_token_s == pytest.approx(8e9 / 989e12 / 0.5)
    assert there.trained_token_s == pytest.approx(24e9 / 989e12 / 0.35)
    assert there.exchange_s == pytest.approx(2 * (4 * 3e7 + 8e9) / 4.5e11)


def test_a_model_that_no_gpu_holds_is_refused() -> None:
    with pytest.raises(UsageError, match="weights of 140 GB are too many for one GPU of 80 GB"):
        scaled(MEASURED, find_machine("h100"), find_machine("h100"), SMALL._replace(parameters=7e10))


@pytest.mark.parametrize(
    ("work", "changed", "named"),
    [
        (agents(8, 200, wait_s=100.0), {}, "tail of generation"),
        (agents(8, 200), {"call_s": 5.0}, "gateway"),
        (agents(8, 200), {"agent_s": 5.0}, "agents"),
        (agents(8, 200, judge_s=500.0), {}, "judge"),
        (agents(8, 200), {"update_s": 300.0}, "training"),
        (agents(8, 200), {"rest_s": 400.0}, "publish"),
    ],
)
def test_the_bottleneck_is_named_and_more_machines_only_cost_more(
    work: Workload, changed: dict[str, float], named: str
) -> None:
    h100 = find_machine("h100")
    rates = scaled(MEASURED, find_machine("laptop"), h100, SMALL)._replace(**changed)
    rows = where_it_stops(work, rates, h100, Layout(slots=4))
    assert [row.gpus for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert rows[-1].bottleneck == named
    assert rows[0].share == 1.0 and rows[-1].share < 0.05
    assert rows[-1].usd == pytest.approx(1000 * 2.99 * rows[-1].seconds / 3600) and rows[-1].usd > rows[0].usd


def test_two_machines_halve_what_can_be_halved() -> None:
    """Long generation of many groups: nearly all of the step is divided."""
    h100 = find_machine("h100")
    rates = Rates(0.0, 0.01, 0.001, trained_token_s=1e-4)
    rows = where_it_stops(agents(64, 2000), rates, h100, Layout(slots=64))
    assert rows[1].share == pytest.approx(1.0, abs=0.02) and rows[3].share == pytest.approx(1.0, abs=0.05)
