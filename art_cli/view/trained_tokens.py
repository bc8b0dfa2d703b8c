"""The learner's numbers of each trajectory that it trained on: step_0003/learned.jsonl, one line per trajectory."""

import threading
from pathlib import Path
from typing import Any

import msgspec

from art_cli.runs.json_lines import decode, lines
from art_cli.runs.run_file import open_file
from art_cli.runtime.errors import DataError

Json = dict[str, Any]
_ANY = msgspec.json.Decoder()


class _Named(msgspec.Struct):
    id: str = ""


_NAMED = msgspec.json.Decoder(_Named)
MAX_FILES = 64  # files whose places are kept


class LearnedNumbers:
    """The lines of learned.jsonl by the trajectory's id, read when they are asked for."""

    def __init__(self) -> None:
        self._places: dict[Path, tuple[int, dict[str, tuple[int, int]]]] = {}  # file -> (size, id -> (offset, length))
        self._lock = threading.Lock()

    def of(self, path: Path, trajectory: str, *, within: Path | None) -> Json:
        """Returns the line of a trajectory; empty where the run has none."""
        try:
            place = self._find(path, within).get(trajectory)
            if place is None:
                return {}
            with open_file(path, within=within) as file:
                file.seek(place[0])
                found = decode(file.read(place[1]), _ANY)
        except (OSError, ValueError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def _find(self, path: Path, within: Path | None) -> dict[str, tuple[int, int]]:
        with self._lock:
            if not path.is_file():
                return {}
            size = path.stat().st_size
            known = self._places.get(path)
            if known is None or known[0] != size:
                if len(self._places) >= MAX_FILES:
                    self._places.clear()
                known = self._places[path] = (size, _places(path, within))
            return known[1]


def _places(path: Path, within: Path | None) -> dict[str, tuple[int, int]]:
    found = {}
    for line in lines(path, within=within):
        try:
            found[decode(line.data, _NAMED).id] = (line.offset, len(line.data))
        except ValueError:  # half-written, or no line of ours
            continue
    return found
