"""A learner's step on a GPU that is not there: no mix-up of devices, known waits, the memory that was estimated.

The device is tests/support/standins/fake_device.py, which raises on mixed devices. Here are a few layers of real
widths; the whole models are in benchmarks/forecasts/fake_device.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.forecasts.fake_device import ESTIMATES, opened
from tests.support.standins.fake_device import FakeDevice

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# Where a step may wait for the device, each at most a few times for a pack. None is inside a layer.
WAITS = {
    "algorithms/pack_loss.py:terms_in nonzero",  # the tokens of a component of the loss
    "step/gradient.py:accumulate item",  # whether the loss is finite
    "learners/optimizer.py:clip item",  # whether the gradient is
    "step/step_statistics.py:add item",  # sums for metrics
    "step/step_statistics.py:add_pack item",
    "step/step_statistics.py:logprob_gaps index by a mask",
    "packs/logprob_reader.py:read_pack to the host",  # scores
    "step/training_record.py:_array to the host",
    "packs/logprobs.py:__init__ item",  # whether a temperature is not 1
    "step/gradient.py:divergence index by a mask",  # how far an update moved the policy
    "step/gradient.py:divergence item",
}
SNAPSHOT = "learners/optimizer.py:_copied_to_cpu to the host"  # weights and moments before the step
MOST_WAITS = 12  # times that a place may wait for one pack


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Gemma-3-4B", "Qwen2.5-1.5B"])
def test_a_step_has_only_the_known_waits_and_the_files_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    with opened(name, layers=2) as bench:
        bench.step(64)  # the first compares packs with plain rows, which may wait
        found = bench.step(512)
        bench.learner.save(tmp_path)
    num_parameters = len(bench.learner.parameters)
    assert found.waits.pop(SNAPSHOT) == 3 * num_parameters
    assert found.waits.keys() <= WAITS
    assert max(found.waits.values()) <= MOST_WAITS * bench.learner.train_config.epochs_per_step
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as moments:
        assert len(moments.keys()) == 3 * num_parameters


@pytest.mark.quantize
def test_a_step_on_4_bits_has_only_the_known_waits() -> None:
    with opened("Qwen3-8B-4bit", layers=2) as bench:
        bench.step(64)
        assert bench.step(512).waits.keys() <= {*WAITS, SNAPSHOT}


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_the_estimated_peak_is_that_of_the_step_within_a_tenth(estimate: str) -> None:
    with opened("Qwen3-0.6B", layers=8) as bench:
        bench.step(64)
        predicted, counted = ESTIMATES[estimate](bench, 4096), bench.step(4096).peak
    assert predicted == pytest.approx(counted, rel=0.1)


def test_the_device_counts_bytes_and_waits_and_refuses_two_devices() -> None:
    with FakeDevice() as device:
        first = torch.ones(1000).to(device.device)
        assert device.now == 4096  # in blocks of 512
        second = first * 2
        assert device.now == device.peak == 8192
        del first
        assert device.now == 4096
        assert float(second.sum()) == 0 and second.tolist() == [0.0] * 1000 and not (second > 0).any()
        assert [wait.rpartition(" ")[2] for wait in device.waits] == ["item", "host"]
        with pytest.raises(AssertionError, match=r"a tensor \[1000\] of cpu beside one of gpux"):
            second + torch.ones(1000)
        with pytest.raises(AssertionError, match="repeat_interleave waits"):
            torch.ones(2, device=device.device).repeat_interleave(second.long()[:2])
