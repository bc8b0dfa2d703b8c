"""A server that is killed between an optimizer step and its reply, and what it leaves."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.tinker.server.checkpoint_store import UNFINISHED_S, Notes, Place, RunNotes, Store
from tests.support.models.tiny import save_tiny_base
from tests.support.processes import forked
from tests.support.servers.backend_server import Client, serving, tiny_base
from tests.tinker.test_backend import ADAM, IDS, adapter, are_equal, saved, steps_of, trained

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@pytest.mark.slow
def test_a_step_whose_reply_was_lost_by_a_crash_is_there_once(tmp_path: Path) -> None:
    """The client sends the request again under its number, gets a 404, goes on from its checkpoint, and has the adapter
    of the same steps without a crash, bit for bit."""
    path, root = save_tiny_base(tmp_path / "base", hidden=32), tmp_path / "root"
    command = ["backend", "--base", path, "--port", "0", "--json", "--checkpoints", root, "learner=torch"]
    module = "tests.support.servers.crashing_backend"
    server = forked.Forked(command, module=module, stdout=forked.PIPE, stderr=forked.PIPE)
    first, second = steps_of("", [IDS[:1]]), steps_of("", [IDS[1:2]])
    try:
        assert server.stdout is not None
        with Client(json.loads(server.stdout.readline())["url"]) as client:
            client.base_model = str(path)
            model = client.new_model()
            for number, (route, fields) in enumerate(first, 1):
                assert "error" not in client.call(route, **fields | {"model_id": model, "seq_id": number})
            uri = client.call("save_weights", model_id=model, seq_id=3, path="one")["path"]
            client.call("forward_backward", **second[0][1] | {"model_id": model, "seq_id": 4})
            lost = {"model_id": model, "seq_id": 5, "adam_params": ADAM}
            client.post("optim_step", **lost)
            server.communicate(timeout=60)
        assert server.returncode == -9
    finally:
        server.kill()
        server.communicate()
    base = tiny_base(tmp_path / "again")
    with serving(base, root) as address, Client(address) as client:
        assert client.http.post("optim_step", json=lost).status_code == 404
        made = client.call("load_weights", session_id=client.session, model_seq_id=0, path=uri, optimizer=True)
        numbered = [(route, fields | {"model_id": made["model_id"]}) for route, fields in second]
        for route, fields in [*numbered, *numbered]:
            assert "error" not in client.call(route, **fields)
        end = client.call("save_weights", model_id=made["model_id"], seq_id=3, path="end")["path"]
        assert are_equal(adapter(client, end), saved(trained(base, [IDS[:1], IDS[1:2]]), tmp_path / "local"))


def test_what_a_killed_server_left_half_written_is_swept_and_what_is_being_written_stays(tmp_path: Path) -> None:
    run, old = f"{'0' * 32}:train:0", time.time() - UNFINISHED_S - 60
    store = Store(tmp_path, base="tiny", dtype="float32", quota=None)
    store.save(Place(run, "weights", "whole"), "me", 1, Notes(created=0.0), fill, over=False)
    for name in ("weights/.x.{}.tmp/a", ".run.json.{}.tmp", "notes/weights/.x.json.{}.tmp"):
        for mark, is_old in (("0123abcd", True), ("4567abcd", False)):
            file = tmp_path / run / name.format(mark)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"half")
            for each in (file, file.parent) if is_old and name.endswith("/a") else (file,) if is_old else ():
                os.utime(each, (old, old))
    store.sweep()
    assert sorted(path.name.split(".")[-2] for path in tmp_path.rglob("*.tmp")) == ["4567abcd"] * 3
    assert [at.name for at, _ in store.checkpoints(run)] == ["whole"]


def test_a_sweep_amid_a_save_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes are written before the directory has its name; a sweep comes in between, also where another is replaced."""
    at = Place(f"{'0' * 32}:train:0", "weights", "x")
    store = Store(tmp_path, base="tiny", dtype="float32", quota=None)
    store.add_run(RunNotes(id=at.run, owner="me", base_model="tiny", rank=4, created=0.0))

    def note_and_sweep(at: Place, notes: Notes) -> None:
        Store.note(store, at, notes)
        store.sweep()

    monkeypatch.setattr(store, "note", note_and_sweep)
    for is_over in (False, True):
        store.save(at, "me", 1, Notes(created=0.0), fill, over=is_over)
        store.find(at, "me")


def fill(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"whole")


def killer(after: int) -> Callable[[str, object], None]:
    """A hook that ends this process at its change of the disk number `after`, counted from 1."""
    left = iter(range(after - 1))

    def hook(event: str, _: object) -> None:
        if event in CHANGES and next(left, None) is None:
            os._exit(9)

    return hook


@pytest.mark.slow
def test_a_kill_amid_a_save_or_a_deletion_leaves_nothing_that_is_never_swept(tmp_path: Path) -> None:
    """The process is killed at its first, second, ... system call that makes, renames or removes something."""
    run = f"{'0' * 32}:train:0"
    at, status, kills = Place(run, "weights", "x"), -1, 0
    while status != 0:
        root, kills = tmp_path / str(kills), kills + 1
        pid = os.fork()
        if not pid:
            try:
                sys.addaudithook(killer(kills))
                store = Store(root, base="tiny", dtype="float32", quota=None)
                store.add_run(RunNotes(id=run, owner="me", base_model="tiny", rank=4, created=0.0))
                store.save(at, "me", 1, Notes(created=0.0), fill, over=False)
                store.delete(at)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 9)
        for path in root.rglob("*"):
            os.utime(path, (1.0, 1.0))
        store = Store(root, base="tiny", dtype="float32", quota=None)
        store.sweep()
        assert not list(root.rglob("*.tmp")), kills
        if (root / run / "weights/x").exists():
            assert [each.name for each, _ in store.checkpoints(run)] == ["x"], kills
            store.find(at, "me")
    assert kills > 10
