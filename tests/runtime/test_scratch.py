"""Temporary directories: those of killed processes are removed by the next, those of living ones never."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_cli.runtime.scratch import OWNER, Scratch, scratch
from tests.support.processes import forked
from tests.support.servers.served import make_run
from tests.support.standins import fake_vllm

HOLD = """
import sys
from art_cli.runtime.scratch import scratch
with scratch("serve") as place:
    (place / "base").mkdir()
    (place / "vllm.log").write_text("said")
    print(place, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


@pytest.fixture
def holders(home: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in which a scratch directory is open, started by `hold`."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def hold(holders: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], Path]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True)
    holders.append(process)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_directory_of_a_killed_process_is_removed_by_the_next(
    home: Path, holders: list[subprocess.Popen[str]]
) -> None:
    """SIGKILL leaves it behind; that of a living process, and whatever else lies there, is not touched."""
    killed, abandoned = hold(holders)
    _, held = hold(holders)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    others = [home / "art-project", home / "art-serve-mine", home / "other"]
    for other in others:
        other.mkdir()
        (other / "file").touch()
    (home / "art-notes.txt").touch()
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).touch()
    (home / "art-link").symlink_to(elsewhere)
    (home / "art-odd").mkdir()
    (home / "art-odd" / OWNER).symlink_to(elsewhere / OWNER)
    assert abandoned.is_dir()
    with scratch("serve") as place, scratch("export") as second:
        assert place.is_dir() and second.is_dir()
        assert not abandoned.exists()
        assert (held / "base").is_dir() and (held / "vllm.log").read_text() == "said"
    assert not place.exists() and not second.exists()
    assert all((other / "file").exists() for other in others)
    assert (home / "art-notes.txt").exists() and (elsewhere / OWNER).exists() and (home / "art-odd").exists()


def test_a_failure_leaves_its_logs_and_nothing_else(home: Path) -> None:
    with pytest.raises(ValueError), scratch("serve") as place:
        (place / "base").mkdir()
        (place / "secret.jinja").touch()
        (place / "empty.log").touch()
        (place / "vllm.log").write_text("why")
        raise ValueError
    with scratch("serve"):  # the next one leaves them where the error said they are
        assert [path.name for path in place.iterdir()] == ["vllm.log"]
    with pytest.raises(ValueError), scratch("serve") as place:
        (place / "base").mkdir()
        raise ValueError
    assert not place.exists()
    kept = Scratch("learner")
    (kept.path / "learner.log").write_text("why")
    kept.keep_logs()
    kept.close()
    assert (kept.path / "learner.log").read_text() == "why"


def art_serve(root: Path, *options: str) -> forked.Forked:
    command = ["serve", root, "--port", "0", "--json", *options]
    return forked.Forked(command, stdout=forked.PIPE, stderr=forked.PIPE)


@pytest.mark.slow
def test_a_failed_vllm_start_names_a_log_that_stays_and_shows_its_last_lines(home: Path, tmp_path: Path) -> None:
    """And a killed `art serve` leaves a directory that the next one removes, beside the log that it does not."""
    run = make_run(tmp_path / "mine", (1,))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{fake_vllm.__file__}" "$@"\n')
    python.chmod(0o755)
    options = ["--engine", "vllm", "--set", f"python={python}", "--set"]
    failed = art_serve(run.root, *options, "env={FAKE_VLLM: no start}")
    _, errors = failed.communicate(timeout=120)
    assert failed.returncode == 1
    assert "ended while it started (exit status 3)" in errors and "  ValueError: no such model" in errors
    (log,) = home.glob("art-serve-*/*")
    assert log.name == "vllm.log" and f"the last lines of {log}:" in errors
    assert "ValueError: no such model" in log.read_text()
    assert not log.stat().st_mode & 0o077
    with art_serve(run.root, "--engine", "embedded") as killed:
        assert killed.stdout is not None and killed.stdout.readline()
        assert len(list(home.glob(f"art-serve-*/{OWNER}"))) == 1
        killed.kill()
    assert len(list(home.glob(f"art-serve-*/{OWNER}"))) == 1
    with scratch("serve"):
        assert len(list(home.glob(f"art-*/{OWNER}"))) == 1
        assert log.exists()
