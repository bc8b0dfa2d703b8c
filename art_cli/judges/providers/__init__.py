"""The seam to a model that judges: Provider, what it answers, and how a call fails.

    http.py       OpenAI and any OpenAI-compatible `api_base`
    litellm.py    every other provider that litellm knows
    caller.py     when a call is made, and made again: concurrency, rate limits, tries, budget
    waits.py      how long a provider asks to wait
    keys.py       API keys

A provider makes one call and says what came of it. It does not try again.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from art_cli.judges.costs import Usage
from art_cli.judges.text import clean
from art_cli.secrets import Secrets
from art_cli.trajectory import Json

# retry: the same call may succeed later.  late: so may this one, whose deadline passed.  unreachable: and this one,
# which nobody was there to answer.  refused: this call will not (too long).  too_large: its answer is no verdict, and
# asking in other words does not help.  used_up: no call will until the quota is renewed.  stopped: no call will (a
# wrong key).
FailureKind = Literal["retry", "late", "unreachable", "refused", "too_large", "used_up", "stopped"]

MAX_MESSAGE = 300  # characters of a provider's error text that are shown
MAX_ERROR = 64_000  # characters of it that are read
LONG_ANSWER = 8_000  # bytes or characters from which an answer is read in a thread, not on the event loop
MAX_ANSWER = 1_000_000  # characters; a longer answer is no verdict
MAX_TOKENS = 100_000_000  # of one call; a larger number is not one
# How providers say that the money or the quota is gone, which no short wait cures.
_USED_UP = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "credit balance is too low")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said, secrets taken out, and what it took."""

    text: str
    finish_reason: str
    usage: Usage
    pause_s: float = 0.0  # the provider's rate-limit headers ask for this much quiet


class CallFailed(Exception):
    """One call came to nothing. The message is one line without secrets."""

    def __init__(self, message: str, kind: FailureKind, *, retry_after_s: float | None = None) -> None:
        self.kind, self.retry_after_s = kind, retry_after_s
        super().__init__(message)


class Provider(Protocol):
    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        """One call; with `schema`, the answer is asked to be JSON of that schema. Raises CallFailed."""
        ...

    async def close(self) -> None: ...


def classify(status: int, text: str) -> FailureKind:
    """What an HTTP error status means for this call and for the ones after it."""
    said = text[:MAX_ERROR].lower()
    if status == 402 or (status in (400, 403, 429) and any(words in said for words in _USED_UP)):
        return "used_up"
    if status in (408, 409, 425, 429) or status >= 500:
        return "retry"
    return "stopped" if status in (401, 403, 404, 405) else "refused"


def one_line(text: str, secrets: Secrets) -> str:
    """A provider's error text for our own: redacted, on one line, not long."""
    line = " ".join(secrets.redact(text[:MAX_ERROR]).split())
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."


def content_text(content: Any, secrets: Secrets) -> str:
    """A reply's content as one text without secrets; a list of parts is put together. Raises TypeError for others.

    Of a text longer than any verdict no more is kept than shows that.
    """
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise TypeError(f"content is a {type(content).__name__}")
    return secrets.redact(clean((content or "")[: MAX_ANSWER + 1]))


def read_count(value: Any) -> int | None:
    """A number of tokens as a provider says it; None where it says none that can be believed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:  # nor is NaN
        return None
    return int(value)
