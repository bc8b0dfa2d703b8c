"""What a command reads of an address: the right checkpoint, verified, and nothing outside the cache directory."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from art_cli.config.store_address import is_address, problem_of
from art_cli.runs import run_checkpoints as checkpoints
from art_cli.runs.manifest import Manifest, manifest_digest
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.served import Served, write_served
from art_cli.runs.storage.fetch import INDEX, NothingThere, Objects, _bring_labels, fetch
from art_cli.runs.storage.object_store import ObjectStore, is_safe
from art_cli.runtime.errors import CheckpointError, StorageError, UsageError
from art_cli.serving.served_model import find_source
from tests.runs.storage.test_lease import opened, upload
from tests.support.records.kept_runs import add_step, content, made
from tests.support.standins.fragile_store import FragileFileSystem

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("which", ["offered", "best", "newest"])
def test_an_address_means_the_checkpoint_that_the_run_itself_means(tmp_path: Path, address: str, which: Which) -> None:
    run = made(tmp_path / "mine", 4, at_1=0.9, at_3=0.5)
    upload(opened(run, f"{address}/mine"))
    there, here = checkpoints.find(fetch(f"{address}/mine", "policy"), which=which), checkpoints.choose(run, which)
    assert there is not None and there.step == here.step
    assert content(checkpoints.RunDir(there.path.parent.parent), there.step) == content(run, here.step)


def test_an_address_means_the_promoted_checkpoint_which_a_night_made(tmp_path: Path, address: str) -> None:
    run = made(tmp_path / "mine", 3)
    night = made(run.root / "nights" / "night_0001" / "run", 2)
    (night.base / "model").mkdir(parents=True)
    (night.base / "model" / "config.json").write_text("{}")
    write_served(run.root, Served("nights/night_0001/run/checkpoints/step_0002", "policy"))
    upload(opened(run, f"{address}/mine"))
    root = fetch(f"{address}/mine", "policy")
    there, here = checkpoints.find(root), checkpoints.choose(run, "offered")
    assert there is not None and there.path.relative_to(root) == here.path.relative_to(run.root)
    assert content(checkpoints.RunDir(there.path.parent.parent), 2) == content(night, 2)
    assert (root / "nights/night_0001/run/base/model/config.json").is_file()
    assert not list(root.glob("nights/*/run/checkpoints/step_0001"))
    assert checkpoints.RunDir(root).checkpoint_steps() == [3], "and the newest of the run itself, for --last"
    source = find_source(str(root), base="base")
    assert source.run is not None and source.run.root == root
    assert source.trained_in is not None and source.trained_in.root == root / "nights/night_0001/run"


def test_the_commands_say_the_same_of_an_address_and_of_the_directory(tmp_path: Path, address: str, art: Art) -> None:
    run = made(tmp_path / "mine", 3, at_1=0.9, at_3=0.5)
    upload(opened(run, f"{address}/mine"))
    for command in ("report", "checkpoints"):
        here, there = art(command, run.root), art(command, f"{address}/mine")
        assert there[0] == here[0] == 0
        shown = there[1].replace(str(fetch(f"{address}/mine", "records")), str(run.root))
        shown = shown.replace(f"{address}/mine", str(run.root))  # the report names what is there
        assert shown == here[1]
    code, _, error = art("report", f"{address}/none")
    assert (code, error) == (2, f"error: {address}/none: no run and no checkpoint there\n")


def test_a_second_call_brings_what_changed(tmp_path: Path, address: str) -> None:
    run = made(tmp_path / "mine", 2)
    mirror = opened(run, f"{address}/mine")
    upload(mirror)
    place = checkpoints.RunDir(fetch(f"{address}/mine", "policy"))
    assert place.checkpoint_steps() == [2]
    add_step(run, 3)
    upload(mirror)
    before = (place.root / "config.json").stat()
    fetch(f"{address}/mine", "policy")
    assert place.newest_checkpoint() is not None and place.checkpoint_steps()[-1] == 3
    assert place.metrics_path.read_bytes() == run.metrics_path.read_bytes()
    assert (place.root / "config.json").stat().st_ino == before.st_ino


def test_a_file_that_grows_while_it_is_brought_is_brought_again_and_one_that_is_gone_goes(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "mine", 2)
    mirror = opened(run, f"{address}/mine")
    upload(mirror)
    real = ObjectStore.objects

    def objects(store: ObjectStore) -> Objects:
        """Lists, and then a step is uploaded before the first download."""
        found = real(store)
        monkeypatch.setattr(ObjectStore, "objects", real)
        run.append_metrics(3, "train", {"reward_mean": 0.5})
        upload(mirror)
        return found

    monkeypatch.setattr(ObjectStore, "objects", objects)
    place = checkpoints.RunDir(fetch(f"{address}/mine", "records"))
    assert place.metrics_path.read_bytes() == run.metrics_path.read_bytes()
    stale = place.root / "step_0009" / "scored.jsonl"
    stale.parent.mkdir()
    stale.write_text("{}")
    index = json.loads((place.root / INDEX).read_text())
    (place.root / INDEX).write_text(json.dumps(index | {"step_0009/scored.jsonl": "old", "../../x": "old"}))
    fetch(f"{address}/mine", "records")
    assert not stale.exists() and place.metrics_path.read_bytes() == run.metrics_path.read_bytes()


def test_a_damaged_checkpoint_is_passed_over_and_refused_when_it_is_named(tmp_path: Path, address: str) -> None:
    run = made(tmp_path / "mine", 2)
    upload(opened(run, f"{address}/mine"))
    store = ObjectStore(f"{address}/mine")
    store.write("checkpoints/step_0002/adapter_model.safetensors", b"x" * 4000)
    found = checkpoints.find(fetch(f"{address}/mine", "policy"))
    assert found is not None and found.step == 1
    with pytest.raises(CheckpointError, match="does not match its hash"):
        fetch(f"{address}/mine/checkpoints/step_0002", "policy")
    store.delete(["checkpoints/step_0000/optimizer.safetensors"])
    with pytest.raises(CheckpointError, match="optimizer.safetensors is missing"):
        fetch(f"{address}/mine/checkpoints/step_0000", "policy")


HOSTILE = ["../evil", "../../evil", "checkpoints/../../evil", "a/../../../evil", ".ssh/evil", "logs/lock",
           "a\\..\\evil", "x\ny", "checkpoints/step_0002/../../../evil", "-rf", "a//evil", "/evil", "é"]  # fmt: skip


def test_hostile_object_names_reach_no_file(
    tmp_path: Path, address: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one in a manifest whose own hash is right."""
    upload(opened(made(tmp_path / "mine", 2), f"{address}/mine"))
    root = FragileFileSystem._strip_protocol(f"{address}/mine")
    file = next(iter(FragileFileSystem.store.values()))
    for name in HOSTILE:
        FragileFileSystem.store[f"{root}/{name}"] = file
    store = ObjectStore(f"{address}/mine")
    manifest = msgspec.json.decode(store.read("checkpoints/step_0002/manifest.json", limit=99999), type=Manifest)
    manifest.files["../../../../evil"] = next(iter(manifest.files.values()))
    manifest.digest = manifest_digest(msgspec.json.encode(manifest))
    store.write("checkpoints/step_0002/manifest.json", msgspec.json.encode(manifest))
    before = {path for path in tmp_path.rglob("*") if cache not in path.parents}
    found = checkpoints.find(fetch(f"{address}/mine", "everything"))
    assert found is not None and found.step != 2
    assert "refused the file name" in caplog.text and "with names that no run has" in caplog.text
    assert not list(cache.rglob("*evil*")) and not list(cache.rglob("lock"))
    assert {path for path in tmp_path.rglob("*") if cache not in path.parents} - {cache} == before


def test_names_that_a_run_has_are_safe() -> None:
    for name in ("config.json", "step_0003/scored.jsonl", "checkpoints/step_0004/adapter_model.safetensors",
                 "base/model-00001-of-00002.safetensors", "logs/engine 0.log"):  # fmt: skip
        assert is_safe(name)
    assert not any(map(is_safe, [*HOSTILE[:5], *HOSTILE[6:], "", "a" * 600, "/".join("abcdefghijk")]))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("s3://key:secret@bucket/x", "must not hold a key"), ("s3://bucket/../x", "empty parts"), ("s3://", "looks like"),
     ("s3://b/x?versionId=1", "cannot contain"), ("simplecache::s3://b/x", "looks like"), ("s3://b//x", "empty parts")],
)  # fmt: skip
def test_an_address_with_a_key_or_a_way_out_is_refused(text: str, problem: str) -> None:
    assert problem in problem_of(text)
    with pytest.raises(UsageError) as caught:
        fetch(text, "records")
    assert "secret" not in str(caught.value)


def test_what_is_no_address_is_a_path() -> None:
    assert not any(map(is_address, ["runs/mine", "C:/x", "/s3:/x", "s3:/x", 7, None]))
    assert is_address("s3://bucket") and not problem_of("abfs://box@account.dfs.core.windows.net/x")
    with pytest.raises(NothingThere):
        fetch("memory://nothing/here", "policy")


def test_labels_that_were_given_here_stay_when_those_of_the_store_come(tmp_path: Path) -> None:
    """Also where the store's last line is torn, and none are lost where the download fails."""
    labels, store = tmp_path / "step_0001" / "labels.jsonl", ObjectStore(f"file://{tmp_path}/bucket")
    labels.parent.mkdir()
    labels.write_text('{"mine":1}\n{"both":1}\n')
    with pytest.raises(StorageError):
        _bring_labels(store, "labels.jsonl", labels, 5)
    assert labels.read_text() == '{"mine":1}\n{"both":1}\n' and len(list(labels.parent.iterdir())) == 1
    theirs = b'{"both":1}\n{"theirs":1}\n{"tor'
    store.write("labels.jsonl", theirs)
    assert _bring_labels(store, "labels.jsonl", labels, len(theirs)) == len(theirs)
    assert labels.read_text() == '{"mine":1}\n{"both":1}\n{"theirs":1}\n'
