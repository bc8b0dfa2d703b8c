"""Resolves plug-in strings: `file.py:attr` in the config's directory, or `package.module:attr` from the environment.

Only this module turns configuration strings into objects. A file is loaded once under a unique module name. Its
directory is importable, so rollouts can import neighboring files. Two files of different directories may each import
their own `tools`; an import within a function finds the one that was loaded last.
"""

import importlib
import importlib.util
import sys
import threading
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from art_cli.runtime.errors import UsageError, message_of

_loading = threading.RLock()  # a single thread runs files
_directories: set[Path] = set()  # of the files loaded so far


def resolve(entry: str, *, base: Path) -> Any:
    """Returns the object named by `entry`; paths are relative to `base`. Raises UsageError if it cannot."""
    module_name, separator, attribute = entry.rpartition(":")
    if not separator or not module_name or not attribute:
        raise UsageError(f"{entry!r}: expected 'file.py:function' or 'package.module:function'")
    module = _load_file(base / module_name, entry) if module_name.endswith(".py") else _import(module_name, entry, base)
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{entry}: {module_name} has no {attribute!r}{hint}") from None


def _load_file(path: Path, entry: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"{entry}: no such file: {path}")
    name = f"art_plugin_{path.stem}_{abs(hash(str(path))):x}"
    with _loading:  # other threads wait until the file has run
        return sys.modules.get(name) or _run_file(path, name, entry)


def _run_file(path: Path, name: str, entry: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # set before running, because dataclasses and pickle look up the module
    _put_first(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{entry}: {_where(error, path)}: {type(error).__name__}: {message_of(error)}") from error
    return module


def _put_first(directory: Path) -> None:
    """Makes the directory's modules importable, and forgets modules of the same names from other files' directories."""
    sys.path[:] = [str(directory), *(each for each in sys.path if each != str(directory))]
    names = {each.stem for each in directory.iterdir() if each.suffix in ("", ".py")} - {"__main__"}
    for name, module in list(sys.modules.items()):
        top, file = name.partition(".")[0], Path(getattr(module, "__file__", None) or "")
        if top not in names or "site-packages" in file.parts or not any(map(file.is_relative_to, _directories)):
            continue
        if file != directory / f"{top}.py" and not file.is_relative_to(directory / top):
            del sys.modules[name]
    _directories.add(directory)


def _import(module_name: str, entry: str, base: Path) -> ModuleType:
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        text = message_of(error)
        raise UsageError(f"{entry}: cannot import {module_name}: {type(error).__name__}: {text}") from error


def _where(error: BaseException, path: Path) -> str:
    """Returns `file:line` of the innermost frame in the user's file, or the line of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}:{lines[-1]}" if lines else str(path)


def place_of(error: BaseException, root: Path) -> str | None:
    """Returns `file:line` of the innermost frame in a file under `root`, relative to `root`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f"{path.relative_to(root)}:{frame.lineno}"
    return None
