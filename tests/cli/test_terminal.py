"""What reaches the terminal or a file of foreign texts: no escape codes, no forged lines, no keys in any form."""

import base64
import html
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.cli.app import report
from art_cli.runs.durable import write_lines
from art_cli.runtime.errors import ConfigError, DataError, EngineError, JudgeError, Problem, printable, printable_lines
from art_cli.runtime.log import kept, set_up
from art_cli.runtime.secrets import Secrets, find_secrets
from tests.support.judges.judge_server import Conduct, serving
from tests.support.judges.ruler_cases import rated
from tests.support.paths import ROOT

CANARY = "sk-proj/Can+ary_9Z0=123"
STEERING = (
    "\x1b[2J\x1b[1A",
    "\r",
    "\n",
    "\x07",
    "\x08",
    "\x9b31m",
    "\u202e",
    "\u2066",
    "\u2028",
    "\x85",
    "\ud800",
    "\x00",
)
HARMLESS = "é 漢字 😀 👩‍👩‍👧 \\ % <b> ñ ا ש"


def is_quiet(text: str) -> bool:
    return not any(code in text for code in STEERING if code != "\n") and text.isprintable() or not text


@pytest.mark.parametrize("code", STEERING, ids=ascii)
def test_a_text_that_steers_the_terminal_is_shown_as_its_escapes(code: str) -> None:
    text = f"before{code}error: forged {HARMLESS}"
    shown = printable(text)
    assert code not in shown and shown.startswith("before\\") and shown.endswith(f"error: forged {HARMLESS}")
    assert len(shown.splitlines()) == 1 and shown.encode()
    assert printable_lines(f"a\n\tb{code}") == (f"a\n\tb{code}" if code == "\n" else f"a\n\tb{printable(code)}")


@pytest.mark.parametrize("code", STEERING, ids=ascii)
def test_a_log_record_and_an_error_are_one_line_whatever_they_repeat(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    set_up()
    logging.getLogger("art_cli.some").warning("group %s", f"g{code}error: forged")
    try:
        raise ValueError(f"x{code}y")
    except ValueError:
        logging.getLogger("art_cli.some").exception("failed")
    err = capsys.readouterr().err
    first, second, *_ = err.split("\n")
    assert first == f"group g{printable(code)}error: forged" and second == "failed"
    assert code == "\n" or code not in err
    with kept(tmp_path / "train.log", str.upper):
        logging.getLogger("art_cli.some").warning("group %s", f"g{code}error: forged")
    [line] = (tmp_path / "train.log").read_text().splitlines()
    assert line.endswith(f"GROUP G{printable(code).upper()}ERROR: FORGED")
    for error in (JudgeError(f"x{code}error: forged"), DataError("y", f"x{code}z", 3)):
        [line], _ = report(error)
        assert code not in line and line.startswith("error: x")
    lines, exit_code = report(ConfigError([Problem("a", "f:1", f"x{code}y"), Problem("b", "f:2", "z")]))
    assert len(lines) == 2 and exit_code == 2 and not any(code in line for line in lines)
    lines, _ = report(EngineError(f"its last words:\n  a\x1b[0m\n  b{code}"))
    assert lines[:2] == ["error: its last words:", "error:   a\\x1b[0m"]


def each(escape: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: "".join(map(escape, text))


FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "upper case": str.upper,
    "json": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "json, each": each(lambda c: f"\\u{ord(c):04x}"),
    "json, each, upper": each(lambda c: f"\\u{ord(c):04X}"),
    "json in json": each(lambda c: f"\\\\u{ord(c):04X}"),
    "url": lambda key: urllib.parse.quote(key, safe=""),
    "url, lower": lambda key: urllib.parse.quote(key, safe="").lower(),
    "url, each": each(lambda c: f"%{ord(c):02x}"),
    "url, turns": lambda key: "".join(f"%{ord(c):02x}" if i % 2 else f"%{ord(c):02X}" for i, c in enumerate(key)),
    "url twice": lambda key: urllib.parse.quote(urllib.parse.quote(key, safe="")),
    "a url's query": lambda key: f"https://h/v1?a=1&key={urllib.parse.quote_plus(key)}&b=2",
    "html": lambda key: html.escape("".join(f"&#{ord(c)};" for c in key)).replace("&amp;", "&"),
    "html, hexadecimal": each(lambda c: f"&#x{ord(c):X};"),
    "python": each(lambda c: f"\\x{ord(c):02x}"),
    "hexadecimal": lambda key: key.encode().hex(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "basic": lambda key: "Basic " + base64.b64encode(f"user:{key}".encode()).decode(),
    "bearer": lambda key: base64.urlsafe_b64encode(f"Authorization: Bearer {key}\r\n".encode()).decode(),
    "base64 in url": lambda key: urllib.parse.quote(base64.b64encode(f"ab:{key}".encode()).decode(), safe=""),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_a_key_is_masked_in_every_form(form: str) -> None:
    secrets = Secrets([CANARY, "another-secret"])
    shown = FORMS[form](CANARY)
    for before, after in itertools.product(("", "key ", f'"{HARMLESS} '), ("", " .", '", "x": 1')):
        redacted = secrets.redact(before + shown + after)
        assert redacted.startswith(before) and redacted.endswith(after) and "***" in redacted
        assert len(redacted) <= len(before) + len(after) + len("https://h/v1?a=1&key=***&b=2")


def test_texts_without_a_key_stay_as_they_are() -> None:
    secrets = Secrets([CANARY, "abcdefgh"])
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(
            draw.choices([HARMLESS, "\\n", "%41", "\\u00e9", "&#65;", '"', "abc", "efgh", "QUJD", "\n"], k=20)
        )
        if "abcdefgh" not in urllib.parse.unquote(text):
            assert secrets.redact(text) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["\\n" * 500_000, "%41" * 300_000, "a" * 1_000_000, "&#65" * 250_000, "\\" * 1_000_000]
)
def test_a_text_made_of_escapes_takes_no_time(text: str) -> None:
    started = time.process_time()
    Secrets([CANARY]).redact(text)
    assert time.process_time() - started < 3


def test_passwords_of_urls_and_headers_of_parameters_are_secrets_too() -> None:
    params = {"extra_headers": {"Authorization": "Bearer tok-123456"}, "temperature": 0, "api_key": "key-654321"}
    secrets = find_secrets({}, urls=["https://me:pass%2Fword@host/v1?code=query-key", "http://[bad"], params=[params])
    basic = base64.b64encode(b"me:pass/word").decode()
    text = secrets.redact(f"{basic} pass/word query-key tok-123456 key-654321 temperature")
    assert text == "*** *** *** *** *** temperature"


def judge(place: Path, api_base: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MY_JUDGE_KEY": CANARY}
    return subprocess.run(
        [sys.executable, "-m", "art_cli", "judge", "t.jsonl", "--model", "rule\x1b[2J", "judge.cache=null",
         f"judge.api_base={api_base}", "judge.api_key_env=MY_JUDGE_KEY", "judge.retries=0", *arguments],
        cwd=place, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--verbose",), ("--json",)])
def test_a_providers_error_and_a_groups_id_neither_steer_the_terminal_nor_show_the_key(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    group = "g\x1b[1A\nerror: forged\u202e"
    write_lines(tmp_path / "t.jsonl", rated([0.1, 0.9], group=group))
    said = (
        "".join(f"{form(CANARY)} " for form in list(FORMS.values())[:8]) + "\x1b]0;owned\x07\r\nerror: forged \x9b31m"
    )
    with serving(Conduct(misbehaviour="500", error=said)) as server:
        done = judge(tmp_path, server.api_base, *arguments)
    assert done.returncode == 1
    for text in (done.stdout, done.stderr):
        assert all(is_quiet(line) for line in text.split("\n")), repr(text)
        assert not any(line.startswith("error: forged") for line in text.split("\n"))
        assert not any(form(CANARY) in text for form in FORMS.values())
    assert "answered 500" in done.stderr and "***" in done.stderr
    if "--json" in arguments:
        assert list(json.loads(done.stdout)["owed_because"]) == [group]


@pytest.mark.slow
def test_a_key_escaped_in_an_explanation_is_not_written(tmp_path: Path) -> None:
    """The judge spells the key in JSON escapes, which reading its verdict undoes."""
    spelt = FORMS["json, each"](CANARY)
    write_lines(tmp_path / "t.jsonl", rated([0.1, 0.9]))
    with serving(
        Conduct(says="KEY", change_text=lambda text: text.replace("KEY", f"it is {spelt}, \\u00e9"))
    ) as server:
        done = judge(tmp_path, server.api_base, "--report")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "t.scored.jsonl").read_text().splitlines()]
    assert [line["scores"][0]["explanation"] for line in lines] == ["it is ***, é"] * 2
    assert all(is_quiet(line) for line in done.stdout.split("\n"))
