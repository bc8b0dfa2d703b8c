"""A drawing that lies beside a run is a program of somebody else: it does not run before the viewer has agreed."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.others.browser import chromium, viewing
from tests.support.records.viewed import write_viewed_run

ATTEMPT = "#/s/0/t/s0001-g0002-a03"
SENDER = """
document.body.textContent = "running";
addEventListener("message", async ({ data }) => {
  const said = [...data.trajectory.messages[0].content].slice(0, 8).map((c) => c.charCodeAt(0).toString(16)).join("");
  const connection = new RTCPeerConnection({ iceServers: [{ urls: `stun:${said}.rtc.invalid` }] });
  connection.createDataChannel("out");
  await connection.setLocalDescription();
  setTimeout(() => { location = `http://${said}.navigation.invalid/`; }, 200);
});
"""  # no frame policy prevents both: they leak through host names


@pytest.mark.slow
def test_the_drawing_of_a_run_sends_nothing_before_the_viewer_has_agreed(
    tmp_path: Path, art: Callable[..., tuple[int, str, str]]
) -> None:
    run = write_viewed_run(tmp_path / "run", steps=2)
    run.drawing_path.write_text(SENDER)
    html, log = tmp_path / "run.html", tmp_path / "net.json"
    assert art("view", run.root, "--html", html)[0] == 0
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium(f"--log-net-log={log}", "--net-log-capture-mode=Everything"))
        page = browser.new_page()
        page.goto(f"{html.as_uri()}{ATTEMPT}")
        expect(page.locator(".message").first).to_be_visible()
        expect(page.get_by_role("button", name="Run view.js")).to_have_count(0)
        page.goto(f"{stack.enter_context(viewing(run.root))}/{ATTEMPT}")
        expect(page.get_by_role("button", name="Run view.js")).to_be_visible()
        page.wait_for_timeout(500)
        expect(page.locator("iframe")).to_have_count(0)
    assert ".invalid" not in log.read_text(errors="replace")
