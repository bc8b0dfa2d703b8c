"""A recipe's drawing of a state: the file view.js, a program, inside a separate page.

The page is shown in a frame with `sandbox="allow-scripts"`, so that its origin is its own, and its policy lets it load
nothing. No policy that browsers have keeps it from sending what it is shown: WebRTC and the names of hosts in
addresses are not covered. So a drawing that was found beside a run is shown only after the viewer has agreed. It gets
{"trajectory", "conversation", "message_index"} by postMessage, and draws.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Literal

from art_cli.runs.json_lines import is_inside, read_file
from art_cli.view.sources import ViewSource

MAX_BYTES = 256 * 2**10
DrawingKind = Literal["given", "found"]


def drawing_page(source: ViewSource, given: Path | None) -> str | None:
    """Returns the page of the frame, or None if no drawing was given and the run has none that can be read."""
    script = _script(source, given)
    if script is None:
        return None
    policy = f"default-src 'none'; script-src '{hash_of(script)}'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>drawing</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>html{{color-scheme:light dark}}body{{margin:0;font:14px system-ui,sans-serif}}</style></head>"
        f"<body><script>{script}</script></body></html>"
    )


def drawing_kind(source: ViewSource, given: Path | None) -> DrawingKind | None:
    """Returns "given" for the file of --drawing, "found" for the run's own, or None if there is neither."""
    if given is not None:
        return "given" if given.is_file() else None
    run = source.run
    return "found" if run is not None and is_inside(run.drawing_path, run.root) else None


def _script(source: ViewSource, given: Path | None) -> str | None:
    """Returns the text of the drawing, written so that it cannot end its own element, or None if there is none."""
    try:
        if given is not None:
            data = read_file(given, max_bytes=MAX_BYTES)
        elif source.run is not None:
            data = read_file(source.run.drawing_path, max_bytes=MAX_BYTES, within=source.run.root)
        else:
            return None
    except OSError:
        return None
    return inline_script(data.decode(errors="replace"))


def inline_script(text: str) -> str:
    """The text of a script as it can stand in an HTML page: "</script" and "<!--" are written as "<\\/script"."""
    return re.sub(
        r"<(?=/script|!--|script)", r"\\x3C", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE
    )


def hash_of(script: str) -> str:
    """Returns the source expression of a Content-Security-Policy that allows this inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
