"""Feedback on served conversations: `feedback.jsonl` next to the trajectories, a line per entry.

`art gateway` appends the lines (serving/gateway/feedback_service.py). `latest` joins them with trajectories. A later
entry for the same target and metric replaces an earlier one, and an entry without a value withdraws it.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import SCHEMA_VERSION, Json

FEEDBACK_FILE = "feedback.jsonl"
COMMENT, DEMONSTRATION = "comment", "demonstration"  # metrics that need no declaration
USER = "user"  # the tag that names the user of a client
Optimize = Literal["max", "min"]
Target = tuple[str, str, str]  # conversation, reply ("" for the whole conversation), metric


class FeedbackEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line, redacted.

    Example: FeedbackEntry(id="0199...", at=1764.2, client="key 2", conversation="4f0c...", metric="thumbs", value=True)
    """

    schema_version: int = SCHEMA_VERSION
    id: str  # UUIDv7
    at: float  # seconds since the epoch
    client: str  # the client that made the calls, as in the journal: "key 2"
    conversation: str  # trajectory id
    reply: str = ""  # id of the rated reply, 32 hexadecimal digits; "": the whole conversation
    policy: str = ""  # digest of the policy that wrote the reply, or the conversation's last one; "" if unproven
    answered_at: float = 0.0  # time of this reply, in seconds since the epoch; 0: unknown
    metric: str
    # a metric's number, a comment's text, a demonstration's assistant message in OpenAI's form; None if withdrawn
    value: bool | float | str | Json | None = None
    optimize: Optimize = "max"  # the metric's declaration when the entry was written
    tags: dict[str, str] = {}
    key: str = ""  # digest of client and Idempotency-Key

    @property
    def target(self) -> Target:
        return self.conversation, self.reply, self.metric


def latest(path: Path, *, within: Path | None = None) -> dict[str, list[FeedbackEntry]]:
    """Returns by trajectory id the feedback that counts: the newest entry of each target, without withdrawn ones.

    `path` is the file or its directory. A missing file gives no feedback. Links that lead out of the directory `within`
    are refused. Raises DataError for a line that is not an entry.
    """
    file = path / FEEDBACK_FILE if path.is_dir() else path
    newest = {entry.target: entry for entry in read_lines(file, FeedbackEntry, within=within)}
    found: dict[str, list[FeedbackEntry]] = {}
    for entry in newest.values():
        if entry.value is not None:
            found.setdefault(entry.conversation, []).append(entry)
    return found


def rating(entries: Sequence[FeedbackEntry], metric: str) -> float | None:
    """Returns the reward of a conversation with these entries: the metric's mean, or None if no entry has it.

    A metric of replies has several values. An entry for the whole conversation replaces those for its replies, because
    the metric's declaration has changed. True is 1 and False is 0. Metrics to minimize are negated.
    """
    rated = [
        (entry.reply, -float(entry.value) if entry.optimize == "min" else float(entry.value))
        for entry in entries
        if entry.metric == metric and isinstance(entry.value, bool | float)
    ]
    counting = [value for reply, value in rated if not reply] or [value for _, value in rated]
    return fmean(counting) if counting else None
