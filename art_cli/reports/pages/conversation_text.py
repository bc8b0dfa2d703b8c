"""Conversations as text: before and after training with next commands, whole conversations, and last replies."""

import shlex
from collections.abc import Iterator

from art_cli.judges.ruler.attempt_tree import Conversation, Message, read_conversation
from art_cli.reports.before_after import BeforeAfter, PlayedAttempt
from art_cli.reports.pages.report_text import Report, evaluation_rows
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import printable

MAX_TEXT = 300  # shown characters of a message
MAX_REPLY = 80  # shown characters of a last reply
WIDTH = 40  # characters of a bar


def conversation_text(found: BeforeAfter, report: Report) -> str:
    """Returns the whole text. The run's texts are included unchanged, so print it with `printable_lines`."""
    lines = ["", f"A held-out scenario, {found.scenario}, before and after the training"]
    if len(found.shared) > 1:
        lines.append(f"({len(found.shared) - 1} messages before it are not shown)")
    lines += _said(found.shared[-1:])
    for title, attempt in (("before", found.before), ("after", found.after)):
        lines += ["", _title(title, attempt), *_said(attempt.messages)]
    run = shlex.quote(str(report["run"]))
    lines += ["", f"{report['reward_names']['eval']} on held-out scenarios", *_curve(report)]
    lines += ["", "What comes next", f"  art view {run}", f"  art serve {run}"]
    return "".join(f"{line}\n" for line in lines)


def _title(title: str, attempt: PlayedAttempt) -> str:
    reward = "" if attempt.reward is None else f", reward {attempt.reward:g}"
    return f"{title} (step {attempt.step}{reward})"


def _said(messages: Conversation, limit: int | None = MAX_TEXT) -> Iterator[str]:
    for message in messages:
        yield f"  {message.role:10s} {_cut(_text(message), limit) or '(nothing)'}"


def _text(message: Message) -> str:
    return " ".join(" ".join(segment.text for segment in message.segments).split())


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else f"{text[:limit]}..."


def whole_text(attempt: Trajectory) -> str:
    """Returns an attempt's whole conversation, one line per message."""
    reward = "no reward" if attempt.returned_reward is None else f"reward {attempt.returned_reward:g}"
    lines = _said(read_conversation(attempt.messages), None)
    return "\n".join([f"{attempt.scenario_id}: {attempt.error or reward}", *lines]) + "\n"


def last_reply(attempt: Trajectory) -> str:
    """Returns the model's last reply, cut to MAX_REPLY characters, or ""."""
    said = [_text(message) for message in read_conversation(attempt.messages) if message.role == "assistant"]
    return printable(_cut(said[-1], MAX_REPLY)) if said else ""


def _curve(report: Report) -> Iterator[str]:
    """Yields a bar per evaluation, scaled from 0 to the highest reward or 1."""
    means = {str(each["step"]): each["reward"]["mean"] for each in report["evaluations"] if each["reward"]}
    top = max([1.0, *means.values()])
    for step, reward, _ in evaluation_rows(report):
        bar = "█" * round(WIDTH * max(0.0, means.get(step, 0.0)) / top)
        yield f"  step {step:>4s}  {bar:{WIDTH}s}  {reward}"
