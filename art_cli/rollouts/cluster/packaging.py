"""Packages for the nodes of a cluster: copies of the config's directory and of this package, in a directory.

Not sent are hidden files (.env, .git, .venv), the runs, environments of Python, and single files above a size. So
keys that lie in a .env file stay here.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from art_cli.rollouts.bootstrap import PACKAGE
from art_cli.runtime.errors import UsageError, message_of

MAX_FILES = 20_000
MAX_BYTES = 200 * 10**6  # Ray takes 500 MiB, which each node would load before its first attempt
MB = 10**6
NEVER = ("__pycache__",)
NOT_PLAYED = ("view", "recipes")  # rooms of the package that hold no code of rollouts


class Sent(NamedTuple):
    """Example: Sent(12, 40_000, ["data/big.csv (31.0 MB)"])"""

    num_files: int
    num_bytes: int
    too_large: list[str]


def copy_project(directory: Path, target: Path, *, runs: Path, exclude: Sequence[str], max_file_mb: float) -> Sent:
    """Copies what nodes need of `directory`. Raises UsageError: it is too much, or cannot be read."""
    num_files = num_bytes = 0
    sizes: list[tuple[int, str]] = []
    too_large: list[str] = []
    for path in _files(directory, runs, exclude):
        name = path.relative_to(directory).as_posix()
        try:
            size = path.stat().st_size
            if size > max_file_mb * MB:
                too_large.append(f"{name} ({size / MB:,.1f} MB)")
                continue
            num_files, num_bytes = num_files + 1, num_bytes + size
            sizes.append((size, name))
            if num_files > MAX_FILES or num_bytes > MAX_BYTES:
                raise UsageError(_too_much(directory, sizes))
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            cure = "rollout.cluster.exclude leaves it out"
            raise UsageError(f"{path}: it cannot be sent to the cluster: {message_of(error)}; {cure}") from error
    return Sent(num_files, num_bytes, too_large)


def copy_package(target: Path) -> None:
    """Copies the Python code of this package."""

    def left_out(place: str, names: list[str]) -> list[str]:
        own = NOT_PLAYED if place == PACKAGE else ()
        return [
            name
            for name in names
            if name in (*NEVER, *own) or not (name.endswith(".py") or os.path.isdir(os.path.join(place, name)))
        ]

    shutil.copytree(PACKAGE, target, ignore=left_out)


def _files(directory: Path, runs: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for place, directories, files in os.walk(directory):
        here = Path(place)
        directories[:] = sorted(name for name in directories if _is_sent(here / name, directory, runs, exclude))
        for name in sorted(files):
            path = here / name
            if _is_sent(path, directory, runs, exclude) and path.is_file():
                yield path


def _is_sent(path: Path, directory: Path, runs: Path, exclude: Sequence[str]) -> bool:
    if path.name.startswith(".") or path.name in NEVER or path == runs or (path / "pyvenv.cfg").is_file():
        return False
    name = path.relative_to(directory).as_posix()
    return not any(fnmatch(name, pattern.strip("/")) or fnmatch(path.name, pattern.strip("/")) for pattern in exclude)


def _too_much(directory: Path, sizes: list[tuple[int, str]]) -> str:
    largest = ", ".join(f"{name} ({size / MB:.1f} MB)" for size, name in sorted(sizes, reverse=True)[:3])
    return (
        f"{directory}: more than {MAX_FILES:,} files or {MAX_BYTES / MB:.0f} MB would be sent to each node, such as "
        f"{largest}; leave some out with rollout.cluster.exclude"
    )
