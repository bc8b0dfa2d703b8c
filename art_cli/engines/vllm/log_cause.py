"""Finds why a vLLM server died from its log: the error in the failed process, not in processes that waited for it.

vLLM logs a worker's traceback, then the engine core's, then the API server's, which ends "See root cause above".
Each line starts with its process: "(Worker_TP0 pid=7) ERROR 11-27 18:11:31 [core.py:9] ValueError: too long".
"""

import re
from itertools import pairwise

_LINE = re.compile(r"(?:\((?P<process>\w+)[^()]*\) )?(?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?(?P<text>.*)")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:: .*)?$")  # last line of a traceback, such as "ValueError: too long"
_ARGUMENTS = re.compile(r"[\w.]+: error: .+")  # argparse's, such as "entry.py: error: unrecognized arguments: --x"
_CHAIN = ("During handling of", "The above exception was")  # between chained tracebacks
_TOO_LONG = re.compile(r"max seq len \(\d+\)")  # more than the cache holds
_FITTING = re.compile(r"estimated maximum model length is (\d+)")
_COLOR = re.compile(r"\x1b\[[\d;]*m")  # where FORCE_COLOR is set
SERVER = "APIServer"  # starts the other processes and reports their failures
MAX_CAUSE = 400  # characters; some messages are long, for example vLLM's list of quantization methods


def find_cause(log: str, *, has_server: bool = True) -> str:
    """Returns the cause found in a log, in one line, or "".

    `has_server` False ignores the API server's errors.
    Example: "ValueError: To serve at least one request with the model's max seq len (40960), 5.6 GiB is needed".
    """
    lines: dict[str, list[tuple[int, str]]] = {}  # by process: (number, text without the prefix)
    for number, line in enumerate(_COLOR.sub("", log).splitlines()):
        found = _LINE.match(line)
        assert found is not None, "every part of the pattern is optional"
        lines.setdefault(found["process"] or "", []).append((number, found["text"]))
    failures = {process: failure for process, each in lines.items() if (failure := _first_failure(each))}
    of_others = [failure for process, failure in failures.items() if process not in (SERVER, "")]
    if of_others or (failures and has_server):
        return _with_cure(min(of_others or failures.values())[1])
    refused = (text for each in lines.values() for _, text in each if _ARGUMENTS.match(text))
    return next(refused, "")[:MAX_CAUSE]


def _with_cure(cause: str) -> str:
    """Returns the cause, shortened. If the context does not fit in the cache, the cause ends with art's key for it."""
    cure = ""
    if _TOO_LONG.search(cause):
        fitting = _FITTING.search(cause)
        cure = f"; set model.max_length{f'={fitting[1]}' if fitting and int(fitting[1]) else ''}"
    return cause[:MAX_CAUSE] + cure


def _first_failure(lines: list[tuple[int, str]]) -> tuple[int, str] | None:
    """Returns line number and text of the process's earliest exception; with chaining, of its last link."""
    failure, is_inside, is_chained = None, False, False
    for (number, text), (_, after) in pairwise([*lines, (0, "")]):
        if text.startswith("Traceback (most recent call last)"):
            if failure and not is_chained:
                break
            is_inside, is_chained = True, False
        elif is_inside and _EXCEPTION.match(text):
            more = after.strip() if after.startswith("  ") else ""  # pydantic explains itself on the next line
            failure, is_inside = (number, f"{text} {more}".strip()), False
        elif text.startswith(_CHAIN):
            is_chained = True
    return failure
