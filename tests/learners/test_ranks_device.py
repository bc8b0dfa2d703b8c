"""The GPU of a learner's process: its own, counted from the one that `learner.device` names."""

from collections.abc import Sequence

import pytest
import torch

from art_cli.learners.processes.group_ranks import device_of
from art_cli.runtime.errors import LearnerError


def gpus_of(monkeypatch: pytest.MonkeyPatch, device: str, *, processes: int, gpus: int) -> Sequence[int | None]:
    """Returns the index of each process's GPU on a machine with `gpus` GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    found = []
    for rank in range(processes):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found.append(device_of(device).index)
    return found


def test_processes_have_the_gpus_from_the_named_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of(monkeypatch, "auto", processes=4, gpus=8) == [0, 1, 2, 3]
    assert gpus_of(monkeypatch, "cuda", processes=2, gpus=2) == [0, 1]
    assert gpus_of(monkeypatch, "cuda:4", processes=4, gpus=8) == [4, 5, 6, 7]
    with pytest.raises(LearnerError, match="learner.processes is 4, but there are only 3 GPUs from cuda:5 on"):
        gpus_of(monkeypatch, "cuda:5", processes=4, gpus=8)
    with pytest.raises(LearnerError, match="learner.processes is 4, but there are only 2 GPUs, one per"):
        gpus_of(monkeypatch, "auto", processes=4, gpus=2)
