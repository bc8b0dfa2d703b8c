"""Two machines never work on one run at a time, and a directory knows whether another machine was there since."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import Mirror, open_mirror
from art_cli.runs.storage.object_store import LEASE_S, SKEW_S, LeaseRecord, ObjectStore, holder, read_marker, take
from art_cli.runtime.errors import RunError
from tests.support.records.kept_runs import add_step, content, made
from tests.support.standins.fragile_store import FragileFileSystem, Killed


def opened(run: RunDir, address: str) -> Mirror:
    run.root.mkdir(parents=True, exist_ok=True)
    return open_mirror(run, address, 2, True)


def upload(mirror: Mirror) -> None:
    while mirror.uploads.send(everything=True):
        pass


def died(store: ObjectStore, number: int = 1) -> None:
    """The owner of that lease has been dead for long."""
    name = f"lease/{number:06d}.json"
    record = msgspec.json.decode(store.read(name, limit=9999), type=LeaseRecord)
    record.until = time.time() - LEASE_S
    store.write(name, msgspec.json.encode(record))


def test_a_second_machine_is_refused_by_name_until_the_lease_has_run_out(tmp_path: Path, address: str) -> None:
    store = ObjectStore(f"{address}/mine")
    first = take(store, "first")
    with pytest.raises(RunError, match=r"runs/mine: in use by \S+, process \d+; stop it there"):
        take(store, "second")
    assert "in use by" in holder(store)
    first.renew()
    died(store)
    assert holder(store) == ""
    second = take(store, "second")
    assert (second.number, second.record.after) == (2, "first")
    for call in (first.renew, first.confirm, first.give_back):
        with pytest.raises(RunError, match="taken over by"):
            call()
    second.give_back()
    assert take(store, "third").record.after == "second"
    assert take(store, "fourth", begun="third").record.after == "second"  # nothing was done under the third
    assert take(store, "fifth", own="fourth").record.after == "fourth"


def test_a_lease_whose_answer_was_lost_is_taken_all_the_same(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has made the object, and its client's second try finds it there."""
    store = ObjectStore(f"{address}/mine")
    monkeypatch.setattr(store, "create", lambda name, data: bool(store.write(name, data)))
    assert take(store, "first").record.token == "first"


def test_a_clock_that_is_a_little_ahead_takes_no_run_from_a_machine_that_lives(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = ObjectStore(f"{address}/mine"), time.time()
    take(store, "first")
    monkeypatch.setattr("art_cli.runs.storage.object_store.time.time", lambda: now + LEASE_S + SKEW_S - 1)
    with pytest.raises(RunError, match="in use by"):
        take(store, "second")
    monkeypatch.setattr("art_cli.runs.storage.object_store.time.time", lambda: now + LEASE_S + SKEW_S + 1)
    take(store, "second")


def test_of_many_machines_that_start_at_once_one_gets_the_run(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket/mine")

    def start(number: int) -> str | None:
        try:
            return take(store, f"machine-{number}").record.token
        except RunError:
            return None

    with ThreadPoolExecutor(8) as pool:
        assert len([token for token in pool.map(start, range(8)) if token is not None]) == 1


def test_the_same_directory_goes_on_at_once_after_a_kill_with_what_it_had_not_uploaded(
    tmp_path: Path, address: str
) -> None:
    """The lease of the dead process still holds for everybody else."""
    run = made(tmp_path / "mine", 1)
    upload(opened(run, f"{address}/mine"))
    add_step(run, 2)
    with pytest.raises(RunError, match="in use by"):
        opened(RunDir(tmp_path / "other" / "mine"), f"{address}/mine")
    again = opened(run, f"{address}/mine")
    assert again.uploads.owed()[0] == "checkpoints/step_0002"
    assert run.checkpoint_steps() == [0, 1, 2]


@pytest.mark.parametrize("call", ["write", "list"])
def test_a_kill_at_any_call_of_a_start_leaves_a_directory_that_starts_again(
    tmp_path: Path, address: str, call: str
) -> None:
    """The machine dies before its 1st, 2nd, ... call; the directory is still the newest, and nothing is set aside."""
    run = made(tmp_path / "mine", 1)
    upload(opened(run, f"{address}/mine"))
    add_step(run, 2)
    for number in range(12):
        left = [number]

        def before(made_call: str, path: str, left: list[int] = left) -> None:
            left[0] -= made_call == call
            if left[0] < 0:
                raise Killed

        FragileFileSystem.before = staticmethod(before)
        try:
            opened(run, f"{address}/mine")
            break
        except (Killed, RunError):
            pass
        finally:
            FragileFileSystem.before = staticmethod(lambda call, path: None)
    assert number >= 1
    assert opened(run, f"{address}/mine").uploads.owed()[0] == "checkpoints/step_0002"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_another_machine_overtook_is_moved_aside_and_not_mixed_in(
    tmp_path: Path, address: str
) -> None:
    """The first machine dies with step 2 not uploaded; the second makes another step 2 and a step 3."""
    first, second = made(tmp_path / "mine", 1), RunDir(tmp_path / "second" / "mine")
    upload(opened(first, f"{address}/mine"))
    add_step(first, 2)
    died(ObjectStore(f"{address}/mine"))
    mirror = opened(second, f"{address}/mine")
    assert second.checkpoint_steps() == [1]
    add_step(second, 2, size=777)
    add_step(second, 3)
    upload(mirror)
    mirror.lease.give_back()
    lost = content(first, 2)

    def fails(call: str, path: str) -> None:
        if call == "list" and not path.endswith("lease"):
            raise Killed

    FragileFileSystem.before = staticmethod(fails)  # the first start dies with its lease taken and nothing moved
    try:
        with pytest.raises(Killed):
            opened(first, f"{address}/mine")
    finally:
        FragileFileSystem.before = staticmethod(lambda call, path: None)
    assert first.checkpoint_steps() == [0, 1, 2]
    opened(first, f"{address}/mine")
    assert first.checkpoint_steps() == [3]
    assert content(first, 3) == content(second, 3)
    assert content(RunDir(tmp_path / "mine.aside-1"), 2) == lost


def test_a_gateways_directory_stays_where_the_gateway_writes(tmp_path: Path, address: str) -> None:
    """`art gateway` may be running, and what it wrote may not be in the store yet."""
    first, second = made(tmp_path / "mine", 1), RunDir(tmp_path / "second" / "mine")
    journal = first.root / "gateway" / "calls-20261130-000000.jsonl"
    journal.parent.mkdir()
    journal.write_text("one\n")
    upload(opened(first, f"{address}/mine"))
    died(ObjectStore(f"{address}/mine"))
    mirror = opened(second, f"{address}/mine")
    assert (second.root / "gateway" / journal.name).read_text() == "one\n"
    add_step(second, 2)
    upload(mirror)
    mirror.lease.give_back()
    with journal.open("a") as writing:
        opened(first, f"{address}/mine")
        writing.write("two\n")
    assert first.checkpoint_steps() == [2] and journal.read_text() == "one\ntwo\n"


def test_a_machine_that_wakes_after_it_was_overtaken_writes_nothing(tmp_path: Path, address: str) -> None:
    first, second = made(tmp_path / "mine", 1), RunDir(tmp_path / "second" / "mine")
    asleep = opened(first, f"{address}/mine")
    upload(asleep)
    died(ObjectStore(f"{address}/mine"))
    mirror = opened(second, f"{address}/mine")
    add_step(second, 2)
    upload(mirror)
    add_step(first, 2, reward=0.1, size=5)
    FragileFileSystem.calls.clear()
    with pytest.raises(RunError, match="taken over by"):
        upload(asleep)
    assert {call for call, _ in FragileFileSystem.calls} == {"list"}


def test_another_run_of_the_same_name_is_not_written_over(tmp_path: Path, address: str) -> None:
    mirror = opened(made(tmp_path / "mine", 1), f"{address}/mine")
    upload(mirror)
    mirror.lease.give_back()
    before = ObjectStore(f"{address}/mine").objects("checkpoints")
    other = made(tmp_path / "other" / "mine", 3)
    with pytest.raises(RunError, match="a run is here that was never kept"):
        opened(other, f"{address}/mine")
    assert ObjectStore(f"{address}/mine").objects("checkpoints") == before
    assert other.checkpoint_steps() == [0, 1, 2, 3]
    upload(opened(other, f"{address}/elsewhere"))  # an empty place takes a run that began without a store
    assert "checkpoints/step_0003/manifest.json" in ObjectStore(f"{address}/elsewhere").objects()


def test_a_download_that_was_cut_off_is_done_again(tmp_path: Path, address: str) -> None:
    mirror = opened(made(tmp_path / "mine", 2), f"{address}/mine")
    upload(mirror)
    mirror.lease.give_back()
    new, num = RunDir(tmp_path / "new" / "mine"), 0
    download = ObjectStore.download

    def dies(store: ObjectStore, name: str, path: Path, size: int) -> None:
        nonlocal num
        num += 1
        if num == 4:
            raise Killed
        download(store, name, path, size)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ObjectStore, "download", dies)
        opened(new, f"{address}/mine")
    marker = read_marker(new.root)
    assert marker is not None and not marker.is_whole
    opened(new, f"{address}/mine")
    assert new.checkpoint_steps() == [2]
    assert new.metrics_path.read_bytes() == mirror.run.metrics_path.read_bytes()
