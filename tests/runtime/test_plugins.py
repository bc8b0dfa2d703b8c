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


def test_files_of_two_directories_import_their_own_neighbours(tmp_path: Path) -> None:
    for name in ("desk", "desk/mail", "shop"):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "namesake.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "parts" / "__init__.py").write_text("")
        (tmp_path / name / "parts" / "inner.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "rollout.py").write_text("import namesake\nfrom parts import inner\nimport json\n")
    kept = resolve("desk/rollout.py:json", base=tmp_path)
    for name in ("desk", "desk/mail", "shop", "desk"):
        for module in ("namesake", "inner"):
            assert name == resolve(f"{name}/rollout.py:{module}", base=tmp_path).NAME
    assert resolve("shop/rollout.py:json", base=tmp_path) is kept
