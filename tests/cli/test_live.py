"""The panel of `art train` on a real terminal: one picture at the bottom, everything else whole above it."""

import errno
import io
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from art_cli.reports.pages.panel import RunPanel
from art_cli.runs.history import Evaluated, Failures, History, UpdateNumbers
from art_cli.runtime.terminal import _Relay, can_draw
from tests.support.paths import LETTERS, ROOT
from tests.support.processes.terminal import Terminal

TOP, BOTTOM = re.compile(r"^╭─ letters ─+╮$"), re.compile(r"^╰─+╯$")
ROLLOUT = r"""
import asyncio

from art_cli import Outcome

async def rollout(policy, scenario):
    await asyncio.sleep(0.7)  # longer than the time between two drawings, so that each step is seen while it goes
    print("a print \x1b[2J\x1b[31m[red]of the rollout[/red]")
    reply = await policy.client.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": scenario["ask"]}])
    text = reply.choices[0].message.content or ""
    if sum(map(ord, text)) % 5 == 0:
        raise ValueError("boom [bold]\x1b]0;title\x07\x1b[5A of the tool")
    return Outcome(reward=float(sum(map(ord, text)) % 2))
"""


def on_terminal(project: Path, *overrides: str, columns: int, lines: int) -> Terminal:
    command = [sys.executable, "-m", "art_cli", "train", str(project / "config.yaml"), f"runs={project}/runs"]
    return Terminal([*command, *overrides], columns=columns, lines=lines, cwd=ROOT)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(LETTERS, tmp_path / "project")
    (tmp_path / "project/rollout.py").write_text(ROLLOUT)
    return tmp_path / "project"


def panels(screen: list[str]) -> list[list[str]]:
    """The panels on a screen, each as its lines."""
    tops = [number for number, line in enumerate(screen) if TOP.match(line)]
    ends = [number for number, line in enumerate(screen) if BOTTOM.match(line)]
    return [screen[top : end + 1] for top, end in zip(tops, ends, strict=False)]


@pytest.mark.slow
def test_a_run_on_a_narrow_terminal_that_is_resized(project: Path) -> None:
    """40 columns, then 100. Prints and errors of the rollout try to steer the terminal. Nothing of it works.

    Every screen has at most one panel, whole, with the lines of the log above it; at the end it is gone, and all lines
    are there in their order.
    """
    terminal = on_terminal(project, "train.steps=6", "train.keep_checkpoints=1", columns=40, lines=30)
    try:
        terminal.follow(lambda terminal: b"step 2/6" in terminal.raw)
        seen = [each for screen in terminal.screens if (each := panels(screen))]
        assert seen and all(len(each) == 1 for each in seen)
        assert all(len(line) <= 37 for [panel] in seen for line in panel)
        terminal.resize(100, 30)
        terminal.follow()
    finally:
        status = terminal.close()
    assert status == 0 and not terminal.was_hidden and not terminal.screen.cursor.hidden
    wide = [panel for screen in terminal.screens for panel in panels(screen) if len(panel[0]) == 97]
    assert wide and {line[2:8].strip() for panel in wide for line in panel[1:-1]} >= {"step", "now", "reward", "failed"}
    failed = [line for panel in wide for line in panel if line.startswith("│ failed")]
    assert any("boom [bold]\\x1b]0;title" in line for line in failed)
    shown = "".join(terminal.scrolled())
    assert "│" not in shown and "╭" not in shown  # nothing of the panel is left
    assert shown.count("a print \\x1b[2J\\x1b[31m[red]of the rollout[/red]") >= 6 * 12
    places = [shown.index(f"step {step}/6: reward_mean") for step in range(1, 7)]
    assert places == sorted(places)
    assert terminal.screen.title == "" and b"\x1b[31m" not in terminal.raw and b"\x1b[2J" not in terminal.raw
    tail = terminal.lines()
    assert any(line.startswith("serve it:") for line in tail) and any("first" in line for line in tail)


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was(project: Path) -> None:
    terminal = on_terminal(project, "train.steps=500", "eval=null", columns=100, lines=20)
    try:
        terminal.follow(lambda terminal: bool(panels(terminal.lines())) and b"step 1/500" in terminal.raw)
        terminal.type(b"\x03")
        terminal.follow()
        modes = terminal.modes_now
    finally:
        status = terminal.close()
    assert status == 130 and modes == terminal.modes
    assert not terminal.screen.cursor.hidden and terminal.screen.cursor.x == 0
    assert b"\x1b[?1049" not in terminal.raw  # no second screen
    shown = "".join(terminal.scrolled())
    assert "interrupted; what is complete is in" in shown and "continue with: art train" in shown
    assert "╭" not in shown, "\n".join(terminal.scrolled()[-40:])


DRAWING = """
import logging, subprocess, sys, threading
from rich.text import Text
from art_cli.runtime import log
from art_cli.runtime.terminal import can_draw, drawn
log.set_up()
assert can_draw()
with drawn(lambda console: Text("picture", style="red")):
    logging.getLogger("art_cli.x").info("a log line %s", "x" * 200)
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('of a child'); sys.stderr.write(chr(10))"])
    sys.stderr.write("10%\\r50%\\rdone\\n")
    sys.stdout.write("no newline")
print("after")
"""


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=str)
def test_every_line_of_the_process_and_its_children_comes_above(environment: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", DRAWING], columns=50, lines=20, cwd=tmp_path, **environment)
    try:
        terminal.follow()
    finally:
        assert terminal.close() == 0
    assert terminal.lines() == [("a log line " + "x" * 200)[i : i + 50] for i in range(0, 211, 50)] + [
        "of a child", "done", "no newline", "after"
    ]  # fmt: skip
    assert b"picture" in terminal.raw
    assert (b"\x1b[31m" in terminal.raw) == (not environment)


def test_output_is_read_on_when_the_terminal_is_gone() -> None:
    """Else whoever writes would wait for ever, once the pipe is full."""

    def gone(*_: object) -> None:
        raise OSError(errno.EIO, "no terminal")

    source, sink = os.pipe()
    relay = _Relay(source, gone, redraw=gone)
    relay.start()
    writer = threading.Thread(target=lambda: [os.write(sink, b"a line\n" * 1000) for _ in range(40)], daemon=True)
    writer.start()
    writer.join(20)
    assert not writer.is_alive()
    os.close(sink)
    relay.close()


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert [can_draw({"TERM": name}) for name in ("xterm", "dumb", "unknown", "")] == [True, False, False, False]
    assert not can_draw({})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not can_draw({"TERM": "xterm"})


# --- what the panel says ----------------------------------------------------------------------------------------------


def shown(panel: RunPanel, *, columns: int, lines: int = 30) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=file, width=columns, height=lines, force_terminal=True, color_system=None)
    console.print(panel.render(console))
    file.flush()
    return file.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]


def panel() -> RunPanel:
    made = RunPanel("mine [red]\x1b[2J", num_steps=20)
    numbers = {"no_signal_share": 0.25, "sample_tokens_per_s": 1280.0, "run_usd": 0.5}
    updates = [UpdateNumbers(n, {"reward_mean": n / 10, "run_s": 60.0 * n, **numbers}) for n in range(1, 6)]
    made.follow(History(updates, [Evaluated(0, {"reward": 0.7}), Evaluated(5, {"reward": 0.6})]))
    made.show_failures(Failures(3, 8, "timeout: not finished after 600 s", 2))
    return made


def test_the_panel_says_what_the_numbers_say() -> None:
    """Five steps of a minute each, fifteen to come."""
    made = panel()
    with made.stage("step 6/20") as move:
        move(3, 8, "reward 0.4")
        rows = dict(made.rows(80))
    assert rows["step"] == "6 of 20" and rows["now"] == "rollouts  3/8  reward 0.4"
    assert rows["reward"] == "0.500  ▁▃▄▆█" and rows["eval"] == "0.600 at step 5, best 0.700 at 0"
    assert rows["time"] == "5 min 0 s, about 15 min 0 s left" and rows["signal"] == "none in 25% of the groups"
    assert rows["failed"] == "3 of 8, mostly timeout: not finished after 600 s"
    assert rows["cost"] == "$0.5000 for the judge so far" and rows["speed"] == "1,280 tokens/s sampled"
    assert "now" not in dict(made.rows(80)) and dict(RunPanel("x", num_steps=3).rows(80)) == {"step": "1 of 3"}


@pytest.mark.parametrize("columns", [1, 2, 10, 19, 20, 40, 80, 300])
@pytest.mark.parametrize("lines", [1, 3, 6, 30])
def test_it_fits_any_terminal(columns: int, lines: int) -> None:
    drawn = shown(panel(), columns=columns, lines=lines)
    assert len(drawn) <= max(lines - 1, 1) and all(len(line) <= max(columns - 1, 1) for line in drawn)
    assert not any("\x1b[2J" in line for line in drawn)


def test_results_that_are_piped_away_stay_clean(tmp_path: Path) -> None:
    """Standard output is a file: the picture and the log are on the terminal alone."""
    command = f'exec {sys.executable} -c "$PROGRAM" > out.txt'
    terminal = Terminal(["sh", "-c", command], columns=50, lines=20, cwd=tmp_path, PROGRAM=DRAWING)
    try:
        terminal.follow()
    finally:
        assert terminal.close() == 0
    assert (tmp_path / "out.txt").read_text() == "no newlineafter\n"
    assert terminal.lines()[-2:] == ["of a child", "done"] and b"picture" in terminal.raw
