"""One row in a process of its own: `python -m benchmarks.gpu.child ORDER`, started by `python -m benchmarks.gpu`.

Prints a JSON line for each part of its figures as soon as it is there, and at the end {"done": true} or why not:
{"reason": "...", "here": false} where this machine lacks what the row needs.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

from benchmarks.gpu.order import NotHere, Order
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.shapes import weights_of

MOST = 300  # characters of a reason


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries print, and what they print is for the log

    def say(part: dict[str, Any]) -> None:
        os.write(answer, json.dumps(part).encode() + b"\n")

    order = Order(**json.loads(sys.argv[1]))
    try:
        module, _, function = ROWS[order.row].entry.partition(":")
        for figures in getattr(import_module(f"benchmarks.gpu.{module}"), function)(order):
            say({"figures": figures})
    except NotHere as reason:
        say({"reason": _line(str(reason)), "here": False})
    except Exception as error:  # the boundary of this process: the table gets the reason, the log the traceback
        traceback.print_exc()
        say({"reason": _line(f"{type(error).__name__}: {error}"), "here": True})
    else:
        say({"done": True})
    if (weights := weights_of(order)) is not None:
        say({"figures": {"weights": weights}})


def _line(text: str) -> str:
    return " ".join(text.split())[:MOST]


if __name__ == "__main__":
    main()
