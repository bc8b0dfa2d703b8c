"""One held-out conversation before and after, the curve of the evaluations, and what comes next, as text."""

import shlex
from collections.abc import Iterator

from art_cli.judges.ruler.attempt_tree import Conversation
from art_cli.reports.before_after import BeforeAfter, PlayedAttempt
from art_cli.reports.pages.report_text import Report, evaluation_rows

MAX_TEXT = 300  # characters of a message that are shown
WIDTH = 40  # characters of a bar of the curve


def conversation_text(found: BeforeAfter, report: Report) -> str:
    """Returns the whole text. What stands in the run's files is in it as it is, so print it with `printable_lines`."""
    lines = ["", f"A held-out scenario, {found.scenario}, before and after the training"]
    if len(found.shared) > 1:
        lines.append(f"({len(found.shared) - 1} messages before it are not shown)")
    lines += _said(found.shared[-1:])
    for title, attempt in (("before", found.before), ("after", found.after)):
        lines += ["", _title(title, attempt), *_said(attempt.messages)]
    run = shlex.quote(str(report["run"]))
    lines += ["", f"{report['reward_names']['eval']} on held-out scenarios", *_curve(report)]
    lines += ["", "What comes next", f"  art view {run}", f"  art serve {run}", "  art init mine --recipe blank"]
    return "".join(f"{line}\n" for line in lines)


def _title(title: str, attempt: PlayedAttempt) -> str:
    reward = "" if attempt.reward is None else f", reward {attempt.reward:g}"
    return f"{title} (step {attempt.step}{reward})"


def _said(messages: Conversation) -> Iterator[str]:
    for message in messages:
        text = " ".join(" ".join(segment.text for segment in message.segments).split())
        cut = f"{text[:MAX_TEXT]}..." if len(text) > MAX_TEXT else text
        yield f"  {message.role:10s} {cut or '(nothing)'}"


def _curve(report: Report) -> Iterator[str]:
    """Yields a bar for each evaluation, from 0 to the highest reward or 1."""
    means = {str(each["step"]): each["reward"]["mean"] for each in report["evaluations"] if each["reward"]}
    top = max([1.0, *means.values()])
    for step, reward, _ in evaluation_rows(report):
        bar = "█" * round(WIDTH * max(0.0, means.get(step, 0.0)) / top)
        yield f"  step {step:>4s}  {bar:{WIDTH}s}  {reward}"
