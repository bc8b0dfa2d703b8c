"""The pages by task: each command on them parses, each key exists, and each quoted error is a text of the code."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from art_cli.cli import app as cli
from art_cli.config.schema import RunConfig
from tests.support.paths import ROOT

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("serve", "eval", "check", "metrics", "troubleshooting")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIES = "..."  # in a quoted text: what the code fills in
CHANGES = "\0"  # in a text of the code: a value that it fills in
VALUE = re.compile(r"%[-+.\d]*[sdfg]|{[^{}]*}")  # such a value in the template of a log line


def _blocks(page: Path, language: str) -> list[str]:
    return [block for kind, block in BLOCK.findall(page.read_text()) if kind == language]


def _commands() -> list[tuple[str, list[str]]]:
    """Returns the words of each command, with the name of its page."""
    lines = [(page.stem, line) for page in PAGES for block in _blocks(page, "sh") for line in block.splitlines()]
    return [(name, shlex.split(line, comments=True)) for name, line in lines if line.startswith("art ")]


@pytest.mark.parametrize(("page", "words"), _commands(), ids=lambda value: " ".join(value) if value else "")
def test_a_command_of_a_page_parses(page: str, words: list[str]) -> None:
    command: Any = get_command(cli.app).commands[words[1]]  # type: ignore[attr-defined]
    # refuses an unknown option and a missing argument
    given = command.make_context(words[1], words[2:]).params
    for key in (override.partition("=")[0] for override in given.get("overrides") or []):
        assert _is_key(key), key


@cache
def _reference() -> str:
    return (ROOT / "docs/config.md").read_text()


def _is_key(key: str) -> bool:
    return key in RunConfig.model_fields or f"`{key}`" in _reference()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_key_of_a_page_is_in_the_reference(page: Path) -> None:
    sections = "|".join(sorted(RunConfig.model_fields))
    text = re.sub(r"^```text\n.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    keys = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*|: [^`]*)?`", text)) - {"reward.low", "reward.high"}
    assert not [key for key in keys if not _is_key(key)]


@cache
def _texts_of_code() -> list[str]:
    """Returns every string of the package but its docstrings, with CHANGES in place of each value that is filled in."""
    texts = list[str]()
    for path in (ROOT / "art_cli").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else CHANGES for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(VALUE.sub(CHANGES, node.value))
    return texts


def _is_text_of_code(quoted: str) -> bool:
    """Returns whether a text of the code has the quoted parts in order, and a value in place of each VARIES."""
    parts = [re.escape(part) for part in quoted.split(VARIES)]
    pattern = re.compile(f"{CHANGES}.*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in _texts_of_code())


def _quotes() -> list[str]:
    return [line for block in _blocks(ROOT / "docs/troubleshooting.md", "text") for line in block.splitlines()]


@pytest.mark.parametrize("quoted", _quotes())
def test_a_quoted_error_is_a_text_of_the_code(quoted: str) -> None:
    assert sum(map(str.isalpha, quoted)) >= 10
    assert _is_text_of_code(quoted)


def test_there_are_quotes_for_all_symptoms_and_an_invented_one_is_no_text_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert page.count("\n## ") == len(_blocks(ROOT / "docs/troubleshooting.md", "text")) > 10
    assert not _is_text_of_code("cannot listen on ...; choose another planet")
    assert not _is_text_of_code("not finished after 600 s (rollout.timeout_s)")
