"""Plug-in strings become objects: a file runs once, whoever asks for it first."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from art_cli.runtime.errors import UsageError
from art_cli.runtime.plugins import resolve


def test_a_file_runs_once_also_where_threads_ask_for_it_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "with pathlib.Path(__file__).with_suffix('.runs').open('a') as runs:\n"
        "    runs.write('x')\n"
        "time.sleep(0.3)\n"
        "class Mine:\n    pass\n"
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: resolve("slow.py:Mine", base=tmp_path), range(8)))
    assert len(set(map(id, found))) == 1
    assert (tmp_path / "slow.runs").read_text() == "x"


def test_a_file_that_failed_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("1 / 0")
    with pytest.raises(UsageError, match="late.py:1: ZeroDivisionError"):
        resolve("late.py:answer", base=tmp_path)
    file.write_text("answer = 42  # a longer text, so that no compiled file of the first is taken")
    assert resolve("late.py:answer", base=tmp_path) == 42


def test_a_misspelt_name_is_told_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rollout(): ...\n")
    with pytest.raises(UsageError, match="mine.py has no 'rolout'; did you mean 'rollout'"):
        resolve("mine.py:rolout", base=tmp_path)
