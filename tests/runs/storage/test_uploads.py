"""A checkpoint is in the store whole or not at all, whenever the machine that uploads it dies."""

import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest

from art_cli.runs.durable import remove, write_lines
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import Served, write_served
from art_cli.runs.storage.fetch import restore
from art_cli.runs.storage.object_store import ObjectStore
from art_cli.runs.storage.uploads import Uploads, steps_of
from art_cli.serving.gateway.reply_index import Answered, ReplyIndex
from tests.support.records.kept_runs import add_step, content, made
from tests.support.standins.fragile_store import FragileFileSystem, Killed, dies_at


def uploads_of(run: RunDir, store: ObjectStore, *, keep: int = 2) -> Uploads:
    uploads = Uploads(run, store, keep=keep, keeps_best=True, confirm=lambda: None)
    uploads.look()
    return uploads


def send_all(uploads: Uploads) -> None:
    while uploads.send(everything=True):
        pass


def resumed(store: ObjectStore, root: Path) -> int | None:
    """The step that a new machine goes on from."""
    run = RunDir(root)
    root.mkdir(parents=True)
    restore(run, store, "token", own=None)
    found = run.newest_checkpoint()
    return None if found is None else found[1].step


def test_a_machine_that_dies_at_any_write_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, address: str
) -> None:
    """Steps 0 to 3 are there. Step 4 is uploaded by machines that die at their first, second, ... write or removal.

    What a new machine gets each time is step 3 or step 4, equal byte for byte, with the records of all steps before.
    Once the upload ends undisturbed, only what is to be kept is left: 0, 3, 4 and the best, 1.
    """
    run, store = made(tmp_path / "mine", 3, at_1=0.9, at_3=0.5), ObjectStore(f"{address}/mine")
    send_all(uploads_of(run, store))
    add_step(run, 4)
    got: list[int | None] = []
    for number in range(30):
        FragileFileSystem.before = staticmethod(dies_at(number))
        try:
            send_all(uploads_of(run, store))
            break
        except Killed:
            pass
        finally:
            FragileFileSystem.before = staticmethod(lambda call, path: None)
        new = RunDir(tmp_path / f"new-{number}")
        got.append(resumed(store, new.root))
        step = got[-1]
        assert step is not None
        assert content(new, step) == content(run, step)
        assert [line.step for line in new.metrics() if line.split == "train"][:step] == list(range(step))
        assert new.trajectories_path(step - 1).read_bytes() == run.trajectories_path(step - 1).read_bytes()
    assert got == sorted(got) and set(got) == {3, 4}, got
    assert steps_of(store.objects()) == [0, 1, 3, 4]
    assert not [name for name in store.objects("checkpoints") if name.startswith("checkpoints/step_0002/")]


@pytest.mark.slow
def test_a_process_killed_at_random_instants_of_an_upload_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    """Eight real kills, on a store of files."""
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"file://{tmp_path}/bucket/mine")
    send_all(uploads_of(run, store))
    draw = random.Random(5)
    num_unfinished = 0
    for step in range(2, 10):
        add_step(run, step, size=3_000_000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; these wait for nothing
            child = os.fork()
        if child == 0:
            try:
                send_all(uploads_of(run, ObjectStore(store.address)))
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        new = RunDir(tmp_path / "new" / str(step))
        got = resumed(store, new.root)
        assert got is not None and got <= step
        assert content(new, got) == content(run, got)
        num_unfinished += got < step
    assert num_unfinished, "no kill came in time; the test says nothing"


def test_training_may_remove_a_checkpoint_while_it_goes_up(tmp_path: Path, address: str) -> None:
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    before = content(run, 1)

    def removes(call: str, path: str) -> None:
        if path.endswith("adapter_model.safetensors"):
            for each in run.checkpoint_path(1).glob("*"):
                each.unlink()
            if run.checkpoint_path(1).exists():
                run.checkpoint_path(1).rmdir()

    FragileFileSystem.before = staticmethod(removes)
    send_all(uploads_of(run, store))
    FragileFileSystem.before = staticmethod(lambda call, path: None)
    new = RunDir(tmp_path / "new")
    assert resumed(store, new.root) == 1
    assert content(new, 1) == before


def test_another_checkpoint_of_the_same_step_takes_the_place_of_the_first(tmp_path: Path, address: str) -> None:
    """The machine dies between the two: then there is no step 1, and never a mix."""
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    send_all(uploads_of(run, store))
    other = made(tmp_path / "other" / "mine", 0)
    add_step(other, 1, size=999)
    for number in range(6):
        FragileFileSystem.before = staticmethod(dies_at(number))
        with pytest.raises(Killed):
            send_all(uploads_of(other, store))
        FragileFileSystem.before = staticmethod(lambda call, path: None)
        step = resumed(store, tmp_path / f"new-{number}")
        if step == 1:
            verify_checkpoint(tmp_path / f"new-{number}" / "checkpoints/step_0001")
    send_all(uploads_of(other, store))
    new = RunDir(tmp_path / "new")
    assert resumed(store, new.root) == 1
    assert content(new, 1) == content(other, 1)


def test_a_checkpoint_that_lacks_a_file_is_left_out_with_one_warning_and_the_others_go_up(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, store = made(tmp_path / "mine", 3), ObjectStore(f"{address}/mine")
    (run.checkpoint_path(3) / "adapter_model.safetensors").unlink()
    uploads = uploads_of(run, store)
    for _ in range(5):
        is_owed = uploads.send(everything=True)
    assert not is_owed and steps_of(store.objects()) == [0, 2]
    assert caplog.text.count("step_0003: not uploaded, because adapter_model.safetensors is missing") == 1
    add_step(run, 3, size=999)
    send_all(uploads)
    assert steps_of(store.objects()) == [0, 2, 3], "it was made anew"


def test_what_a_file_gained_goes_up_and_what_did_not_change_does_not(tmp_path: Path, address: str) -> None:
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    uploads = uploads_of(run, store)
    send_all(uploads)
    assert uploads.owed() == []
    FragileFileSystem.calls.clear()
    write_lines(run.trajectories_path(1), [{"id": "new"}])
    assert uploads.owed() == ["step_0001/trajectories.jsonl"]
    send_all(uploads)
    assert [path.rpartition("mine/")[2] for call, path in FragileFileSystem.calls if call == "write"] == [
        "step_0001/trajectories.jsonl"
    ]
    again = uploads_of(run, store)
    assert [name for name in again.owed() if "/" in name] == []


def test_a_database_goes_up_as_one_whole_file_while_a_gateway_writes_it(tmp_path: Path, address: str) -> None:
    """The gateway keeps its connection open, so the newest replies are in the log alone. A file that is no database
    goes up as it is."""
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    path = run.root / "gateway" / "replies.sqlite"
    path.parent.mkdir()
    path.with_name("other.sqlite").write_bytes(b"no database")
    index = ReplyIndex(path)
    uploads = uploads_of(run, store)
    for number in range(2):
        index.add({("client", f"reply {number}"): Answered(f"conversation {number}")})
        send_all(uploads)
    send_all(uploads_of(run, store))
    assert sorted(name for name in store.objects() if name.startswith("gateway/")) == [
        "gateway/other.sqlite", "gateway/replies.sqlite"
    ]  # fmt: skip
    store.write("gateway/replies.sqlite-wal", b"of an older art")
    restored = tmp_path / "restored"
    assert resumed(store, restored) == 1
    assert not (restored / "gateway" / "replies.sqlite-wal").exists()
    assert (restored / "gateway" / "other.sqlite").read_bytes() == b"no database"
    copy = ReplyIndex(restored / "gateway" / "replies.sqlite")
    assert [copy.find("client", f"reply {number}") for number in range(2)] == [
        Answered("conversation 0"), Answered("conversation 1")
    ]  # fmt: skip
    copy.close()
    index.close()
    closed = uploads_of(run, store)
    send_all(closed)
    assert closed.owed() == []


def test_a_night_goes_up_with_its_report_and_served_json_last_and_without_locks(tmp_path: Path, address: str) -> None:
    """A report may change without growing, also while no machine looks."""
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    night = run.root / "nights" / "night_0001"
    (night / "gates").mkdir(parents=True)
    for name in ("night.json", "gates/tasks.jsonl", "../lock", "../served.lock"):
        (night / name).write_text("{1}")
    write_served(run.root, Served("checkpoints/step_0001", "policy"))
    FragileFileSystem.calls.clear()
    send_all(uploads_of(run, store))
    written = [path.rpartition("mine/")[2] for call, path in FragileFileSystem.calls if call == "write"]
    of_nights = [name for name in written if name.startswith("nights/") or name == "served.json"]
    assert sorted(of_nights) == ["nights/night_0001/gates/tasks.jsonl", "nights/night_0001/night.json", "served.json"]
    assert of_nights[-1] == "served.json"
    (night / "night.json").write_text("{2}")
    send_all(uploads_of(run, store))
    assert store.read("nights/night_0001/night.json", limit=9) == b"{2}"


def test_a_checkpoint_of_a_night_goes_up_manifest_last_and_goes_when_the_night_drops_it(
    tmp_path: Path, address: str
) -> None:
    run, store = made(tmp_path / "mine", 1), ObjectStore(f"{address}/mine")
    night, uploads = made(run.root / "nights" / "night_0001" / "run", 1), uploads_of(run, store)
    FragileFileSystem.calls.clear()
    send_all(uploads)
    written = [path.rpartition("/checkpoints/")[2] for call, path in FragileFileSystem.calls if call == "write"]
    of_night = [name for name in written if name.startswith("step_")][: 2 * len(content(night, 0))]
    assert all(name.endswith("manifest.json") for name in of_night[-2:])
    for step in (2, 3, 4):
        add_step(night, step)
        send_all(uploads)
        remove(night.checkpoint_path(step - 1))
    send_all(uploads)
    prefix = "nights/night_0001/run/checkpoints/"
    steps = {name.removeprefix(prefix).partition("/")[0] for name in store.objects() if name.startswith(prefix)}
    assert steps == {"step_0000", "step_0004"}


def test_a_run_without_a_checkpoint_leaves_nothing_in_the_store(tmp_path: Path, address: str) -> None:
    run = RunDir(tmp_path / "mine")
    run.root.mkdir()
    run.config_path.write_text("{}")
    store = ObjectStore(f"{address}/mine")
    send_all(uploads_of(run, store))
    assert store.objects() == {}
