"""A recipe's own drawing of a state: the file view.js, inside a page that can reach nothing.

The page is shown in a frame with `sandbox="allow-scripts"`, so that its origin is its own, and its policy lets it load
nothing and send nothing. It gets {"trajectory", "conversation", "message_index"} by postMessage, and draws.
"""

import base64
import hashlib
import re
from pathlib import Path

from art_cli.viewer.sources import ViewSource

MAX_BYTES = 256 * 2**10


def drawing_page(source: ViewSource, given: Path | None) -> str | None:
    """The page of the frame; None: the run has no view.js, and none was given."""
    path = drawing_path(source, given)
    script = _script(path) if path is not None else None
    if script is None:
        return None
    policy = f"default-src 'none'; script-src '{hash_of(script)}'; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>drawing</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>html{{color-scheme:light dark}}body{{margin:0;font:14px system-ui,sans-serif}}</style></head>"
        f"<body><script>{script}</script></body></html>"
    )


def drawing_path(source: ViewSource, given: Path | None) -> Path | None:
    """The file of the drawing; None: there is none."""
    path = given if given is not None else source.run.drawing_path if source.run is not None else None
    return path if path is not None and path.is_file() else None


def _script(path: Path) -> str | None:
    """The text of the file, so that it cannot end its own element. None: no such file, or too large."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return inline_script(text)


def inline_script(text: str) -> str:
    """The text of a script as it can stand in an HTML page: "</script" and "<!--" are written as "<\\/script"."""
    return re.sub(
        r"<(?=/script|!--|script)", r"\\x3C", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.IGNORECASE
    )


def hash_of(script: str) -> str:
    """The source expression of a Content-Security-Policy that allows this inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
