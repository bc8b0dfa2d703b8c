"""A run that is kept in a store trains as one that is not, whatever the store does, and goes on elsewhere."""

import asyncio
import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.loop import train as loop_train
from art_cli.loop.batches import Batch
from art_cli.loop.open_run import Run
from art_cli.loop.train import TrainResult, train
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage import mirror
from art_cli.runs.storage.object_store import LeaseRecord, ObjectStore, take
from art_cli.runs.storage.uploads import steps_of
from art_cli.runtime.errors import RunError, StorageError
from tests.support.paths import LETTERS
from tests.support.standins.fragile_store import FragileFileSystem, hangs, refuses

ADAPTER = "adapter_model.safetensors"
# One rollout at a time, so that what is sampled does not depend on which others happened to share a forward pass.
SETTINGS = ["train.keep_checkpoints=2", "rollout.concurrency=1", "eval=null"]


def run(runs: Path, store: str, steps: int) -> TrainResult:
    words = [f"runs={runs}", f"store={store}", f"train.steps={steps}", *SETTINGS]
    return asyncio.run(train(load_config(LETTERS / "config.yaml", words)))


def adapter(root: Path, step: int) -> bytes:
    return (RunDir(root).checkpoint_path(step) / ADAPTER).read_bytes()


@pytest.mark.slow
def test_a_new_machine_ends_as_an_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    """A run of 4 steps is in the store. Then its machine is made to have died while checkpoint 3 went up and after
    checkpoint 4 never did: of 3 one file is cut in half, and the manifest is there; of 4 nothing.

    The new machine goes on from the checkpoint before, on the attempts that were played, and its adapter of step 4 is
    the first one's.
    """
    first = run(tmp_path / "first", f"file://{tmp_path}/bucket", 4)
    bucket = tmp_path / "bucket/letters"
    assert steps_of(ObjectStore(f"file://{bucket}").objects()) == [0, 3, 4]
    shutil.rmtree(bucket / "checkpoints/step_0004")
    torn = bucket / f"checkpoints/step_0003/{ADAPTER}"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    second = run(tmp_path / "second", f"file://{tmp_path}/bucket", 4)
    assert adapter(second.root, 4) == adapter(first.root, 4)
    lines = [line.step for line in RunDir(second.root).metrics() if line.split == "train"]
    assert lines == [0, 1, 2, 3]
    for step in range(4):
        assert RunDir(second.root).scored_path(step).read_bytes() == RunDir(first.root).scored_path(step).read_bytes()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines and pauses are short."""
    monkeypatch.setattr(mirror, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(mirror, "LAST_WAIT_S", 0.01)
    monkeypatch.setattr(mirror, "END_S", 2.0)


FULL = OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", [PermissionError("403 Forbidden: AKIAKEY"), FULL, None], ids=["403", "full", "hangs"])
def test_a_store_that_fails_never_stops_training_and_is_told_once(
    tmp_path: Path,
    address: str,
    fault: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It fails from the first checkpoint on. Once it works again, the next start uploads what is owed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAKEY")
    is_back, nudge = threading.Event(), mirror.Mirror.nudge

    def breaks(self: mirror.Mirror) -> None:
        monkeypatch.setattr("art_cli.runs.storage.object_store.CALL_S", 0.2)
        FragileFileSystem.before = staticmethod(hangs(is_back) if fault is None else refuses(fault))
        nudge(self)

    monkeypatch.setattr(mirror.Mirror, "nudge", breaks)
    with caplog.at_level(logging.INFO):
        done = run(tmp_path / "runs", address, 1)
    is_back.set()
    assert done.step == 1
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [line for line in told if address in line]
    assert len(told) == 2, told
    assert "training continues" in told[0] and "AKIAKEY" not in told[0]
    assert "not uploaded: checkpoints/step_0001, " in told[1] and str(done.root) in told[1]
    if fault is not None:
        return
    FragileFileSystem.before = staticmethod(lambda call, path: None)
    monkeypatch.setattr(mirror.Mirror, "nudge", nudge)
    monkeypatch.setattr("art_cli.runs.storage.object_store.CALL_S", 20)
    monkeypatch.setattr(mirror, "END_S", 60)
    assert run(tmp_path / "runs", address, 1).was_finished
    assert steps_of(ObjectStore(f"{address}/letters").objects()) == [0, 1]


@pytest.mark.usefixtures("hasty")
def test_a_start_needs_the_store_and_says_so(tmp_path: Path, address: str) -> None:
    FragileFileSystem.before = staticmethod(refuses(ConnectionError("nobody there")))
    with pytest.raises(StorageError, match="nobody there"):
        run(tmp_path / "runs", address, 2)


@pytest.mark.slow
def test_a_machine_that_was_overtaken_stops_and_uploads_nothing_more(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is another machine's from the first update on; the first machine's next step is not taken."""
    update = loop_train.update

    async def overtaken(run: Run, batch: Batch, step: int) -> dict[str, float]:
        assert isinstance(run.mirror, mirror.Mirror)
        store = ObjectStore(f"{address}/letters")
        own = run.mirror.lease.record.token
        if not any(name.endswith("2.json") for name in store.objects("lease")):
            take(store, "other", own=own)
        with pytest.raises(RunError, match="taken over"):
            run.mirror.lease.renew()
        run.mirror._lose(RunError("taken over"))
        return await update(run, batch, step)

    monkeypatch.setattr(loop_train, "update", overtaken)
    with pytest.raises(RunError, match="taken over"):
        run(tmp_path / "runs", address, 3)
    store = ObjectStore(f"{address}/letters")
    assert not {1, 2, 3} & set(steps_of(store.objects()))
    record = json.loads(store.read("lease/000002.json", limit=9999))
    assert LeaseRecord(**record).until > 0, "the other machine's lease was given back"
