"""A recipe's drawing of a state: the program view.js in a separate page.

The page is shown in a frame with `sandbox="allow-scripts"` and therefore has an opaque origin. Its policy forbids
loading anything, but no browser policy prevents leaks through WebRTC or host names in addresses. Drawings found in a
run's directory are therefore shown only after the viewer's consent. A drawing receives {"trajectory", "conversation",
"message_index"} by postMessage.
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
    """Returns the frame's page, if a drawing was given or the run contains a readable drawing."""
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
    """Returns "given" for --drawing, "found" for the run's drawing."""
    if given is not None:
        return "given" if given.is_file() else None
    run = source.run
    return "found" if run is not None and is_inside(run.drawing_path, run.root) else None


def _script(source: ViewSource, given: Path | None) -> str | None:
    """Returns the drawing's text, escaped so it cannot close its script element."""
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
    """Escapes a script for an HTML page: "</script" and "<!--" lose their "<"."""
    return re.sub(
        r"<(?=/script|!--|script)", r"\\x3C", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE
    )


def hash_of(script: str) -> str:
    """Returns the Content-Security-Policy source that allows this inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
