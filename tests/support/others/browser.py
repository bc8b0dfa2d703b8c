"""A headless Chromium of this machine, driven by playwright; and the server of `art view` that it looks at."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.others.node import page_sources
from tests.support.paths import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
START_S = 60.0  # longest wait for the server's address
expect.set_options(timeout=15_000)  # milliseconds
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


@contextlib.contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    """Skips the test where there is no Chromium."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *arguments])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def viewing(*paths: Path, arguments: tuple[str, ...] = (), cwd: Path = ROOT) -> Iterator[str]:
    """`art view` of these paths; the address of its page, without the last slash."""
    command = [sys.executable, "-m", "art_cli", "view", *map(str, paths), "--port", "0", "--no-open", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip().rstrip("/")
        finally:
            server.terminate()
            server.wait(START_S)


def faults(page: Page) -> list[str]:
    """What axe-core finds serious or critical on the page as it stands: rule, and the first element."""
    if not page.evaluate("'axe' in window"):
        page.evaluate((page_sources() / "node_modules/axe-core/axe.min.js").read_text())
    found = page.evaluate("rules => axe.run(document, {runOnly: rules}).then(found => found.violations)", RULES)
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}\n{each['nodes'][0]['failureSummary']}" for each in grave]
