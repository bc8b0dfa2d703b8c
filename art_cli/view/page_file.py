"""The page and its answers as a single HTML file that works offline.

Answers are stored in parts, {URL without query: answer} as base64 of gzip, which the page opens on demand. A step's
lists form a part; a group's attempts form two parts.

    {"main": "H4sI...", "parts": ["H4sI...", ...]}      main: {"answers": {...}, "where": {URL: part number}}

If the file would be too large, trajectories are omitted, starting with medium rewards.
"""

import base64
import contextlib
import gzip
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_cli.runs.durable import write_file
from art_cli.runtime.errors import ArtError, UsageError, printable
from art_cli.view.drawing import hash_of, inline_script
from art_cli.view.group_rows import Query, said
from art_cli.view.index import IndexedGroup, IndexedStep
from art_cli.view.page_answers import Answers, NotThere
from art_cli.view.records import read_bytes
from art_cli.view.sources import ViewSource
from art_cli.view.view_app import json_of, page_file

STYLE, SCRIPT = '<link rel="stylesheet" href="app.css">', '<script defer src="app.js"></script>'
MAX_TEXT = 20_000  # searchable characters per group, if there is room
TEXT_SHARE = 1.0  # search characters per byte of the file; compressed, they take a fifth or less
MAX_MISSES = 20  # limit on consecutive parts that do not fit
RESERVED = 2_000  # bytes for final items
URL_SHARE = 0.25  # bytes per URL character in the table of parts, at most
_Made = Iterator[tuple[str, Callable[[], Any]]]


def write_page(answers: Answers, path: Path, *, max_bytes: int) -> str:
    """Writes the file and returns a summary line. Raises UsageError if the minimum does not fit."""
    html, style, script = _app()
    answers.shows_found = False  # readers of the file gave no consent
    answers.read_all()
    room = max_bytes - len(html) - len(style) - len(script) - len(json_of(answers.sources())) - RESERVED
    parts = _Parts(room)
    parts.keep(_numbers(answers))
    parts.add_all(_lists(answers, int(TEXT_SHARE * max(0, room))))
    if parts.num_missed:
        raise UsageError(f"--max-mb {max_bytes / 1e6:g}: the lists of groups alone are larger; raise it, or name less")
    parts.add_all(_judges(answers))
    shown = parts.add_all(_attempts(answers, is_extreme=True)) + parts.add_all(_attempts(answers, is_extreme=False))
    parts.add_all(_scenarios(answers))
    num = sum(len(step.rows()) for source in answers.all() for step in source.index.steps())
    answers.left_out = num - shown
    parts.keep(iter([("/api/sources", lambda: _at_rest(answers.sources()))]))
    page = _page(html, style, script, parts.object(), parts.drawings)
    write_file(path, page)
    left = f", {answers.left_out:,} omitted (--max-mb)" if answers.left_out else ""
    return printable(f"{path}: {num - answers.left_out:,} trajectories{left}, {len(page) / 1e6:.1f} MB")


class _Parts:
    """The answers in the file, within a byte limit."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._main: dict[str, Any] = {}  # answers that the page needs immediately
        self._parts: list[str] = []
        self._where: dict[str, int] = {}  # URL -> part number
        self.num_missed = 0  # parts that were built but did not fit

    def keep(self, made: "_Made") -> None:
        for url, make in made:
            with contextlib.suppress(NotThere, ArtError):
                self._main[url] = json.loads(json_of(make()))

    def add_all(self, bundles: Iterator["_Made"]) -> int:
        """Adds each bundle that fits as a part. Returns the number of included trajectories."""
        num = misses = 0
        for bundle in bundles:
            if misses >= MAX_MISSES:
                break
            answers = {}
            for url, make in bundle:
                with contextlib.suppress(NotThere, ArtError):
                    answers[url] = json_of(make())
            if answers and not self._add(answers):
                misses += 1
                self.num_missed += 1
                continue
            misses = 0
            num += sum("/trajectory/" in url for url in answers)
        return num

    def _add(self, answers: dict[str, bytes]) -> bool:
        part = _packed(
            b"{" + b",".join(json.dumps(url).encode() + b":" + answer for url, answer in answers.items()) + b"}"
        )
        size = len(part) + 3 + int(URL_SHARE * sum(map(len, answers)))
        if size > self._room:
            return False
        self._room -= size
        self._where |= dict.fromkeys(answers, len(self._parts))
        self._parts.append(part)
        return True

    @property
    def drawings(self) -> list[str]:
        return [answer for url, answer in self._main.items() if url.endswith("/drawing")]

    def object(self) -> bytes:
        """Returns everything as a JSON object without any "<"."""
        main = _packed(json_of({"answers": self._main, "where": self._where}))
        return json.dumps({"main": main, "parts": self._parts}).encode()


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


# --- the answers by importance ----------------------------------------------------------------------------------------


def _numbers(answers: Answers) -> _Made:
    for source in answers.all():
        url = f"/api/source/{source.id}"
        yield url, partial(answers.source, source.id)
        if answers.drawing_kind(source) is not None:
            yield f"{url}/drawing", partial(answers.drawing, source.id)
    yield "/api/revision", lambda: {"revision": 0}


def _lists(answers: Answers, text_length: int) -> Iterator[_Made]:
    """Yields each step's rows, with search text of about `text_length` characters in total."""
    steps = [(source, step) for source in answers.all() for step in source.index.steps()]
    num_groups = sum(step.numbers().num_groups for _, step in steps)
    length = min(MAX_TEXT, text_length // max(1, num_groups))
    for source, step in steps:
        url = _url(source, step)
        bins = partial(answers.histogram, source.id, step.step, step.split)
        yield iter([(f"{url}/groups", partial(_rows, answers, source, step, length)), (f"{url}/histogram", bins)])


def _rows(answers: Answers, source: ViewSource, step: IndexedStep, length: int) -> Any:
    page = answers.groups(source.id, step.step, step.split, Query(limit=2**31))
    for row, group in zip(page.rows, step.groups(), strict=True):
        row.text = _text(step, group, length)
    return page


def _text(step: IndexedStep, group: IndexedGroup, length: int) -> str:
    texts, room = [], length
    for row in group.rows:
        if room <= 0:
            break
        try:
            text = said(read_bytes(step, row), row)[:room]
        except (OSError, ValueError):
            continue
        texts.append(text)
        room -= len(text)
    return "\n".join(texts)


def _judges(answers: Answers) -> Iterator[_Made]:
    for source, step in _steps(answers):
        if step.split == "train":
            url = f"/api/source/{source.id}/judge/{step.step}"
            yield iter([(url, partial(answers.judge, source.id, step.step))])


def _attempts(answers: Answers, *, is_extreme: bool) -> Iterator[_Made]:
    """Yields each group's shared data and extreme attempts, or the remaining attempts."""
    for source, step in _steps(answers):
        for group in step.groups():
            rewarded = sorted((row for row in group.rows if row.reward is not None), key=lambda row: row.reward or 0.0)
            extremes = {row.id for row in (*rewarded[:1], *rewarded[-1:])} or {group.rows[0].id}
            made: list[tuple[str, Callable[[], Any]]] = []
            if is_extreme:
                url = f"{_url(source, step)}/group/{quote(group.id, safe='')}"
                made.append((url, partial(answers.group, source.id, step.step, step.split, group.id)))
            for row in group.rows:
                if (row.id in extremes) == is_extreme:
                    url = f"/api/source/{source.id}/trajectory/{quote(row.id, safe='')}"
                    made.append((url, partial(answers.trajectory, source.id, row.id)))
            yield iter(made)


def _scenarios(answers: Answers) -> Iterator[_Made]:
    for source in answers.all():
        for scenario in dict.fromkeys(row.scenario for step in source.index.steps() for row in step.rows()):
            url = f"/api/source/{source.id}/scenario/{quote(scenario, safe='')}"
            yield iter([(url, partial(answers.scenario, source.id, scenario))])


def _steps(answers: Answers) -> Iterator[tuple[ViewSource, IndexedStep]]:
    """Yields all steps, newest first."""
    for source in answers.all():
        for step in reversed(source.index.steps()):
            yield source, step


def _url(source: ViewSource, step: IndexedStep) -> str:
    return f"/api/source/{source.id}/step/{step.step}/{step.split}"


def _at_rest(sources: Any) -> Any:
    """Marks the sources as not running, because a file is static."""
    for source in sources["sources"]:
        source |= {"is_running": False, "indexing": None}
    return sources


# --- the page ---------------------------------------------------------------------------------------------------------


def _app() -> tuple[str, str, str]:
    """Returns the page's HTML, style and script. Raises UsageError if they were not built."""
    found = [page_file(name) for name in ("index.html", "app.css", "app.js")]
    if None in found:
        raise UsageError("the page is not part of this installation (art_cli/view/app); install art-cli again")
    html, style, script = (data.decode() for data in found if data is not None)
    assert STYLE in html and SCRIPT in html, "index.html has lost its style or its script"
    return html, style.replace("</style", "<\\/style"), inline_script(script)


def _page(html: str, style: str, script: str, data: bytes, drawings: list[str]) -> bytes:
    scripts = [hash_of(each) for each in (script, *_inner(drawings, "script"))]
    styles = [hash_of(each) for each in (style, *_inner(drawings, "style"))]
    policy = (
        f"default-src 'none'; script-src {_quoted(scripts)}; style-src {_quoted(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=False)}">'
    before, _, after = (
        html.replace(SCRIPT, "").replace(STYLE, f"{meta}\n<style>{style}</style>", 1).partition("</body>")
    )
    head = f'{before}<script type="application/json" id="data">'.encode()
    return head + data + f"</script>\n<script>{script}</script>\n</body>{after}".encode()


def _inner(pages: list[str], element: str) -> list[str]:
    """Returns the contents of all elements with this name."""
    return [text for page in pages for text in re.findall(f"<{element}>(.*?)</{element}>", page, flags=re.DOTALL)]


def _quoted(hashes: list[str]) -> str:
    return " ".join(f"'{each}'" for each in dict.fromkeys(hashes))
