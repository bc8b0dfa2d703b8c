"""The seam to a model that judges: Provider, what it answers, and how a call fails.

    http_provider.py      any OpenAI-compatible `api_base`, through httpx
    litellm_provider.py   every provider litellm knows
    caller.py             patience around either: concurrency, rate limits, new tries, budget

A provider makes one call and says what came of it. It does not try again.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from art_cli.judges.cache import Usage
from art_cli.judges.keys import Secrets
from art_cli.trajectory import Json

# retry: the same call may succeed later.  late: so may this one, whose deadline passed.  unreachable: and this one,
# which nobody was there to answer.  refused: this call will not (too long).  stopped: no call will (a wrong key).
FailureKind = Literal["retry", "late", "unreachable", "refused", "stopped"]

MAX_MESSAGE = 300  # characters of a provider's error text that are shown
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


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
    if "insufficient_quota" in text:  # a 429 that no waiting cures
        return "stopped"
    if status in (408, 409, 425, 429) or status >= 500:
        return "retry"
    return "stopped" if status in (401, 403, 404, 405) else "refused"


def one_line(text: str, secrets: Secrets) -> str:
    """A provider's error text for our own: redacted, on one line, not long."""
    line = " ".join(secrets.redact(text).split())
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that `retry-after-ms` or `retry-after` asks to wait; None where neither says (or says a date)."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def quiet_time(headers: Mapping[str, str]) -> float:
    """Seconds until a used-up rate limit is reset, by OpenAI's `x-ratelimit-*` headers; 0 while something remains.

    Example: remaining-requests "0" and reset-requests "1m3s" -> 63.
    """
    longest = 0.0
    for what in ("requests", "tokens"):
        if headers.get(f"x-ratelimit-remaining-{what}", "").strip() == "0":
            reset = headers.get(f"x-ratelimit-reset-{what}", "")
            longest = max(longest, sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION.findall(reset)))
    return longest
