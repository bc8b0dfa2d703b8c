"""`art label` on a real pseudo-terminal: keys, what is shown, the report; Ctrl-C and a kill lose nothing."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.cli.app import run
from art_cli.runs.durable import LineWriter, write_lines
from art_cli.runs.feedback import FeedbackEntry
from art_cli.runs.trajectory import ScoredTrajectory
from tests.cli.test_terminal import STEERING, is_quiet
from tests.support.processes.terminal import Terminal

LONG = "a long answer " * 400


def write_scored(path: Path, *, words: str = "") -> Path:
    with LineWriter(path) as writer:
        for group in range(6):
            for index in range(3):
                said = f"{words}answer {index} {LONG if index == 2 else ''} the end of {index}"
                messages = [{"role": "user", "content": f"question {group}?"}, {"role": "assistant", "content": said}]
                place = {"id": f"{words}g{group}-{index}", "group_id": f"{words}g{group}", "group_size": 3}
                writer.append(ScoredTrajectory(**place, index=index, messages=messages, reward=float(index > 0)))
    return path


def opened(path: Path, columns: int = 100) -> Terminal:
    command = [sys.executable, "-m", "art_cli", "label", str(path)]
    return Terminal(command, columns=columns, lines=30, cwd=path.parent, PYTHONPATH=str(Path(__file__).parents[2]))


def asked(num: int) -> Callable[[Terminal], bool]:
    """Whether so many questions stand on the terminal and the last waits for its key; one typed before is forgotten."""
    return lambda terminal: sum("q quit" in line for line in terminal.scrolled()) >= num and terminal.awaits_a_key


def press(terminal: Terminal, keys: list[bytes], before: int = 0) -> None:
    """Presses each key once its question is there; every key of these leads to a new one."""
    for num, key in enumerate(keys, 1):
        terminal.follow(asked(before + num))
        terminal.type(key)


def verdicts(path: Path) -> list[str]:
    return [json.loads(line)["verdict"] for line in path.with_name("labels.jsonl").read_text().splitlines()]


def test_a_session_shows_two_attempts_side_by_side_and_keeps_each_key(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    terminal = opened(scored)
    modes = terminal.modes
    press(terminal, [b"1", b"\x1b[C", b"0", b"u", b"s", b"q"])
    terminal.follow()
    shown = terminal.scrolled()
    assert terminal.modes_now == modes
    assert terminal.close() == 0
    assert verdicts(scored) == ["left", "right", "equal", "undo", "skip"]
    assert any(line.count("assistant: answer") == 2 for line in shown), "both on one line"
    assert "user: question" in "\n".join(shown) and "reward" not in "\n".join(shown)
    assert any("3 of 18 pairs" in line or "2 of 18 pairs, 1 skipped" in line for line in shown)


def test_a_long_attempt_is_cut_until_a_key_shows_all_of_it(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    terminal = opened(scored)
    num = 0
    while num < 17:
        num += 1
        terminal.follow(asked(num))
        if "more lines; a shows all" in "\n".join(terminal.lines()):
            break
        terminal.type(b"s")
    assert "the end of 2" not in "\n".join(terminal.lines())
    terminal.type(b"a")
    terminal.follow(asked(num + 1))
    assert "the end of 2" in "\n".join(terminal.lines())
    terminal.type(b"q")
    terminal.follow()
    assert terminal.close() == 0


@pytest.mark.slow
def test_ctrl_c_and_a_kill_lose_nothing_and_the_same_command_goes_on(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    terminal = opened(scored)
    modes = terminal.modes
    press(terminal, [b"1", b"2", b"\x03"])
    terminal.follow()
    assert "the same command continues" in " ".join(terminal.scrolled()) and terminal.modes_now == modes
    assert terminal.close() == 130
    assert verdicts(scored) == ["left", "right"]
    terminal = opened(scored)
    press(terminal, [b"1"])
    terminal.follow(asked(2))
    terminal.process.send_signal(signal.SIGKILL)
    terminal.follow()
    terminal.close()
    terminal = opened(scored)
    press(terminal, [b"q"])
    terminal.follow()
    assert any("3 labels" in line or "3 of 18 pairs" in line for line in terminal.scrolled())
    assert terminal.close() == 0 and verdicts(scored) == ["left", "right", "left"]


def test_a_run_is_asked_about_step_by_step_and_undo_goes_back_over_steps(tmp_path: Path) -> None:
    paths = [write_scored(tmp_path / f"step_{step:04d}/scored.jsonl") for step in range(3)]
    terminal = opened(tmp_path)
    press(terminal, [b"1", b"2", b"1", b"u", b"u", b"2", b"q"])
    terminal.follow()
    assert terminal.close() == 0
    said = [said for path in paths for said in verdicts(path)]
    assert sorted(said) == ["left", "left", "right", "right", "undo", "undo"] and all(verdicts(path) for path in paths)


def test_no_text_of_a_file_steers_the_terminal(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl", words="".join(STEERING).replace("\ud800", "") + "[bold]ünï 漢字 ")
    label = {"group_id": "\x1b[2J", "left": "\x1b[2J", "right": "\u202e", "verdict": "left", "time": 0}
    (tmp_path / "labels.jsonl").write_text(json.dumps(label) + "\n")
    terminal = opened(scored)
    press(terminal, [b"1", b"a", b"s", b"q"])
    terminal.follow()
    text = terminal.raw.decode()
    assert terminal.close() == 0
    own = ("\x1b[2m", "\x1b[0m", "\x1b[92m", "\x1b[1m", "\r\n")  # the rule's colour and the dim line, which are ours
    for code in own:
        text = text.replace(code, "\n")
    assert all(is_quiet(line) for line in text.split("\n")), [line for line in text.split("\n") if not is_quiet(line)]
    assert "[bold]" in text and "漢字" in text


def test_the_report_and_json_ask_nothing_and_without_a_terminal_nothing_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    terminal = opened(scored)
    press(terminal, [b"1", b"2", b"1", b"q"])
    terminal.follow()
    terminal.close()
    assert run(["label", str(scored), "--report"]) == 0
    report = capsys.readouterr().out
    assert report.startswith("labels    3 of 18 pairs") and "95 % interval" in report and "judge: {noise: {" in report
    assert run(["label", str(scored), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_labels"] == 3 and len(found["accuracy"]) == 3 and found["noise"].keys() == {
        "false_positive", "false_negative"
    }  # fmt: skip
    assert run(["label", str(tmp_path / "none.jsonl"), "--report"]) == 2
    capsys.readouterr()
    assert run(["label", str(scored)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--report" in said


def test_ratings_of_a_metric_that_no_attempt_has_are_refused_also_if_there_are_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    ratings = [
        FeedbackEntry(
            id=f"f{index}", at=0.0, client="key 1", conversation=f"g0-{index}", metric="thumbs", value=index > 0
        )
        for index in range(3)
    ]
    write_lines(tmp_path / "feedback.jsonl", ratings)
    assert run(["label", str(scored), "--feedback", "thumbs"]) == 0
    assert capsys.readouterr().out.startswith("labels    3 of 18 pairs")
    assert run(["label", str(scored), "--feedback", "thumbz"]) == 2
    assert "feedback.jsonl has no rating of 'thumbz'" in capsys.readouterr().err
