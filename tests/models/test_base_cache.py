"""The user's cache of converted bases: shared through links, safe with concurrent processes, repaired after damage."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.models import base_cache
from art_cli.models.base_cache import take_or_make
from art_cli.runs.durable import new_directory
from art_cli.runs.manifest import HASHES, verify_built, write_hashes

WEIGHTS = "model.safetensors"
CONTENT = {WEIGHTS: b"weights" * 1000, "config.json": b"{}"}

TWO = """
import sys, time
from pathlib import Path
from tests.models.test_base_cache import Made
run, number = Path(sys.argv[1]), sys.argv[2]
while not run.with_name("go").exists():
    time.sleep(0.001)
for key in range(20):
    Made(run / f"{number}-{key}").base(f"key-{key}")
"""


class Made:
    """Bases of runs below a directory, and how often one was converted."""

    def __init__(self, root: Path) -> None:
        self.root, self.num_made = root, 0

    def base(self, key: str = "key", run: str = "run", content: dict[str, bytes] = CONTENT) -> Path:
        """Makes a run's base as base_source.find_base does."""

        def make(empty: Path) -> None:
            self.num_made += 1
            assert not list(empty.iterdir())
            for name, data in content.items():
                (empty / name).write_bytes(data)

        built = self.root / run / "base"
        with new_directory(built) as empty:
            take_or_make(key, empty, make)
            write_hashes(empty)
        verify_built(built)
        assert {name: (built / name).read_bytes() for name in content} == content
        return built


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "art" / "bases"


def test_runs_share_the_bytes_of_one_conversion_and_outlive_the_cache(made: Made, cache: Path) -> None:
    first, second = made.base(run="a"), made.base(run="b")
    assert made.num_made == 1
    for name in CONTENT:
        assert (first / name).samefile(second / name) and (first / name).samefile(cache / "key" / name)
        assert (first / name).stat().st_mode & 0o777 == 0o400
    assert not (first / HASHES).samefile(second / HASHES)  # the run's own proof, which its next start may write anew
    shutil.rmtree(cache)
    verify_built(first)
    shutil.rmtree(first)
    verify_built(second)


def test_where_links_are_refused_a_run_has_copies_of_its_own(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    first, second = made.base(run="a"), made.base(run="b")
    assert made.num_made == 1 and not (first / WEIGHTS).samefile(second / WEIGHTS)
    assert (second / WEIGHTS).stat().st_mode & 0o200  # nobody else's bytes


def cut(entry: Path) -> None:
    (entry / WEIGHTS).chmod(0o600)
    os.truncate(entry / WEIGHTS, 100)


def flip(entry: Path) -> None:
    (entry / WEIGHTS).chmod(0o600)
    (entry / WEIGHTS).write_bytes(CONTENT[WEIGHTS][:-1] + b"S")


def remove_entry(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("a file")


def damage_hashes(entry: Path) -> None:
    (entry / HASHES).chmod(0o600)
    (entry / HASHES).write_bytes(b"{")


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        damage_hashes,
        remove_entry,
        lambda entry: (entry / "config.json").unlink(),
        lambda entry: (entry / HASHES).unlink(),
        lambda entry: (entry / "tokenizer.json").write_text("{}"),
        lambda entry: (entry / WEIGHTS).rename(entry / "other.safetensors"),
    ],
    ids=["cut", "flipped", "hashes", "no-directory", "lost-file", "lost-hashes", "added-file", "renamed"],
)
def test_a_damaged_entry_is_converted_again_and_mended(
    made: Made, cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    made.base(run="a")
    damage(cache / "key")
    made.base(run="b")
    assert made.num_made == 2 and "removed and made again" in caplog.text
    verify_built(cache / "key")
    made.base(run="c")
    assert made.num_made == 2 and [path.name for path in cache.iterdir()] == ["key"]


def test_processes_that_convert_at_once_have_whole_bases_and_leave_one_whole_entry(tmp_path: Path, cache: Path) -> None:
    words = [sys.executable, "-c", TWO, str(tmp_path / "runs")]
    processes = [subprocess.Popen([*words, str(number)], stderr=subprocess.PIPE, text=True) for number in range(3)]
    (tmp_path / "go").touch()
    for process in processes:
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 0
    for base in (tmp_path / "runs").rglob("base"):
        verify_built(base)
    assert len(list((tmp_path / "runs").rglob("base"))) == 60
    names = [path.name for path in cache.iterdir() if path.suffix != ".old"]
    assert sorted(names) == sorted(f"key-{key}" for key in range(20))
    for name in names:
        verify_built(cache / name)


def test_the_cache_has_a_bound_and_its_oldest_entries_make_room(
    made: Made, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.base("first", "a")
    size = sum(path.stat().st_size for path in (cache / "first").iterdir())
    monkeypatch.setattr(base_cache, "MAX_BYTES", 2 * size)
    for number, key in enumerate(("second", "third")):
        made.base(key, f"b{number}")
        os.utime(cache / key, (number, number))
    assert sorted(path.name for path in cache.iterdir()) == ["first", "third"]
    made.base("large", "c", {WEIGHTS: b"x" * 3 * size})
    assert sorted(path.name for path in cache.iterdir()) == ["first", "third"]


def test_a_run_has_its_base_where_the_cache_cannot_be_written(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made.base(run="a")
    made.base(run="b")
    assert made.num_made == 2


def test_a_conversion_that_fails_leaves_no_entry(tmp_path: Path, cache: Path) -> None:
    def make(empty: Path) -> None:
        (empty / WEIGHTS).write_bytes(b"half")
        raise ValueError("damaged file")

    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="damaged file"):
        take_or_make("key", tmp_path / "run", make)
    assert not cache.exists()
