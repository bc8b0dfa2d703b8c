"""A file system of fsspec in memory that fails, hangs or is cut off when a test says so: fragile://NAME/prefix."""

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Killed(BaseException):
    """The machine died in the middle of a call."""


class FragileFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "fragile"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda call, path: None)
    calls: ClassVar[list[tuple[str, str]]] = []

    def _note(self, call: str, path: str) -> None:
        type(self).calls.append((call, path))
        type(self).before(call, path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **knobs: Any) -> None:
        self._note("write", path)
        super().pipe_file(path, value, mode=mode, **knobs)

    def put_file(self, lpath: str, rpath: str, *rest: Any, **knobs: Any) -> None:
        self._note("write", rpath)
        super().put_file(lpath, rpath, *rest, **knobs)

    def rm_file(self, path: str) -> None:
        self._note("delete", path)
        super().rm_file(path)

    def find(self, path: str, *rest: Any, **knobs: Any) -> Any:
        self._note("list", path)
        return super().find(path, *rest, **knobs)


fsspec.register_implementation("fragile", FragileFileSystem, clobber=True)


def dies_at(number: int) -> Callable[[str, str], None]:
    """For `before`: the machine dies at the write or removal of this number, counted from 0."""
    left = [number]

    def before(call: str, path: str) -> None:
        if call != "list":
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    return before


def hangs(until: threading.Event) -> Callable[[str, str], None]:
    def before(call: str, path: str) -> None:
        until.wait(30)

    return before


def refuses(error: Exception) -> Callable[[str, str], None]:
    def before(call: str, path: str) -> None:
        raise error

    return before
