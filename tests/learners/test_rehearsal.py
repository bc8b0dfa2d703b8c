"""A rehearsal: the longest row that the limits allow is tried before the first attempt, and changes nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from art_cli.config.compose import load_config
from art_cli.config.schema import PpoConfig
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop import running_learner
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import LearnerError, OutOfMemory
from tests.support.models.gradients import learner, two_answers
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS


def saved(trained: TorchLearner, directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    trained.save(directory)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("loss", [None, PpoConfig(name="ppo")], ids=["policy", "and critic"])
@pytest.mark.parametrize("num_updates", [0, 1])
def test_it_changes_no_weight_no_moment_and_no_random_state(tmp_path: Path, loss: Any, num_updates: int) -> None:
    """Before the first update and after it: what is saved is the same to the bit, and the next step has the same
    numbers and leaves the same files."""
    files, metrics = [], []
    for rehearses in (False, True):
        trained = learner(tiny_weights(), loss)
        for _ in range(num_updates):
            trained.step([two_answers(trained.weights)])
        before = saved(trained, tmp_path / f"before-{rehearses}")
        if rehearses:
            gigabytes = trained.rehearse(300)
            assert gigabytes is None or 0 < gigabytes < 100
            assert saved(trained, tmp_path / "after") == before
            assert all(parameter.grad is None for parameter in trained.parameters.values())
        drawn = torch.rand(1)
        step = trained.step([two_answers(trained.weights)]).known()
        metrics.append({name: number for name, number in step.items() if name != "train_s"} | {"drawn": float(drawn)})
        files.append(saved(trained, tmp_path / f"step-{rehearses}"))
    assert files[0] == files[1] and metrics[0] == metrics[1]


@pytest.mark.parametrize(("num_tokens", "budget", "rows"), [(300, 64, 1), (100, 300, 3), (100, 399, 3)])
def test_it_runs_as_many_rows_as_a_pack_holds_and_trains_all_their_tokens(
    num_tokens: int, budget: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gradient; and each row counts, as no two are equal."""
    packs: list[Pack] = []
    run = PackRunner.run

    def kept(self: PackRunner, pack: Pack, **knobs: Any) -> Any:
        if torch.is_grad_enabled():
            packs.append(pack)
        return run(self, pack, **knobs)

    monkeypatch.setattr(PackRunner, "run", kept)
    trained = learner(tiny_weights(), micro_batch_tokens=budget)
    trained.rehearse(num_tokens)
    [pack] = packs
    assert len(pack.token_ids) == rows * num_tokens
    assert len(pack.edges.positions) == rows * (num_tokens - 1)


def run_out(self: PackRunner, pack: Pack, **knobs: Any) -> Any:
    """In the place of a long pass: torch's error on a GPU."""
    if len(pack.token_ids) > 128:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return SHORT_RUN(self, pack, **knobs)


SHORT_RUN = PackRunner.run


def test_memory_that_runs_out_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained = learner(tiny_weights())
    before = saved(trained, tmp_path / "before")
    monkeypatch.setattr(PackRunner, "run", run_out)
    with pytest.raises(OutOfMemory) as caught:
        trained.rehearse(300)
    for words in ("micro_batch_tokens", "gradient_checkpointing", "model.max_length", "300 tokens"):
        assert words in str(caught.value)
    assert saved(trained, tmp_path / "after") == before


def test_a_run_whose_longest_row_does_not_fit_ends_before_it_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: nothing was played, no checkpoint was made, and the same command goes on once it fits."""
    monkeypatch.setattr(running_learner, "REHEARSING", ("cpu",))
    loaded = load_config(
        LETTERS / "config.yaml", [f"runs={tmp_path}", "model.max_length=200", "train.steps=1", "eval=null"]
    )
    with monkeypatch.context() as short:
        short.setattr(PackRunner, "run", run_out)
        with pytest.raises(LearnerError, match="model.max_length.*200 tokens"):
            asyncio.run(train(loaded))
    files = RunDir(next(path for path in tmp_path.iterdir() if path.is_dir()))
    assert files.checkpoint_steps() == [] and not list(files.root.glob("step_*"))
    result = asyncio.run(train(loaded))
    assert result.step == 1
    assert "a row of 200 tokens fits" in files.log_path.read_text()
