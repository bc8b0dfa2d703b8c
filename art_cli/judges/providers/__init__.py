"""The seam to a model that judges: the Provider base class, what a provider answers, and how a call fails.

    http.py        OpenAI and any OpenAI-compatible `base_url`
    rule.py        builtin:rule, which follows rules of the rubric and is no model
    litellm.py     every other provider that litellm knows
    caller.py      when a call is made, and made again: concurrency, rate limits, tries, budget
    waits.py       how long a provider asks to wait

A provider makes one call and does not try again.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage, find_price
from art_cli.judges.judge_text import clean, count_tokens
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import printable
from art_cli.runtime.secrets import Secrets

log = logging.getLogger(__name__)

FailureKind = Literal[
    "retry",  # the same call may succeed later
    "late",  # its deadline passed; the same call may succeed later
    "unreachable",  # no server took the call; the same call may succeed later
    "refused",  # this call never succeeds, for example because its prompt is too long
    "too_large",  # its answer is no verdict, and asking in other words does not help
    "used_up",  # no call succeeds until the quota is renewed
    "stopped",  # no call succeeds, for example because the key is wrong
]

MAX_MESSAGE = 300  # characters of a provider's error text that are shown
MAX_MODEL = 100  # characters of a model's name in a reply
MAX_ERROR = 64_000  # characters of a provider's error text that are read
MAX_ANSWER = 3_000_000  # characters; a longer answer is no verdict
MAX_BYTES = 4 << 20  # bytes of a response; a verdict on 64 attempts and 128k tokens of reasoning take a quarter of it
# Brackets and commas of a response. Each may become a Python object; json takes 0.1 s for so many and holds the loop.
MAX_MARKS = 200_000
ENCODINGS = "gzip, deflate"  # encodings that are asked for, because they can be undone piece by piece
LONG_ANSWER = 8_000  # bytes or characters from which an answer is read in a thread, not on the event loop
MAX_TOKENS = 100_000_000  # tokens of one call; a larger number cannot be true
_REFUSED_TEXT = ("moderation", "flagged", "content_filter", "content policy")  # of this call, not of its key
# Words of providers when the money or the quota is gone, which no short wait cures.
_USED_UP = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "credit balance is too low")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The model's text, without secrets, and what the call took."""

    text: str
    finish_reason: str
    usage: Usage
    model: str | None = None  # the model that the reply names, which may not be the one that was asked, or None
    refusal: str = ""  # the words in which the model refuses to answer, or "" if it does not
    pause_s: float = 0.0  # seconds without calls that the provider's rate-limit headers ask for


class CallFailed(Exception):
    """One call failed. The message is one line without secrets."""

    def __init__(self, message: str, kind: FailureKind, *, retry_after_s: float | None = None) -> None:
        self.kind, self.retry_after_s = kind, retry_after_s
        super().__init__(message)


class Provider:
    """Asks one model. `name` is what messages call it."""

    def __init__(self, member: JudgeModelConfig, secrets: Secrets, name: str) -> None:
        self.member, self.secrets, self.name = member, secrets, name
        self.price = find_price(member)
        self._has_warned = False  # about usage that is not a number of tokens

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        """Makes one call; with `schema` it asks for JSON of that schema. Raises CallFailed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Closes the connections."""

    def shown(self, text: str) -> str:
        """Returns a provider's error text as one short line without secrets."""
        return printable(" ".join(self.secrets.redact(text[:MAX_ERROR]).split()), limit=MAX_MESSAGE)

    def read_text(self, content: Any) -> str:
        """Returns a reply's content as one text without secrets; parts are joined. Raises TypeError for others.

        A text longer than any verdict is cut one character behind MAX_ANSWER, so that the reader still sees its excess.
        """
        if isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, dict))
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str | None):
            raise TypeError(f"content is a {type(content).__name__}")
        return self.secrets.redact(clean((content or "")[: MAX_ANSWER + 1]))

    def read_refusal(self, refusal: Any, reason: Any) -> str:
        """Returns a reply's refusal as one short line, or the filter that stopped the reply, or ""."""
        words = refusal if isinstance(refusal, str) else ""
        return self.shown(words or ("content_filter" if reason == "content_filter" else ""))

    def read_model(self, name: Any) -> str | None:
        """Returns the model that a reply names, or None; without secrets, and as a part of a metric's name may be."""
        name = self.secrets.redact(name[:MAX_ERROR]) if isinstance(name, str) else ""
        return re.sub(r"[^A-Za-z0-9_./:@-]", "_", name)[:MAX_MODEL] or None

    def read_tokens(self, said: Sequence[Any], messages: Sequence[Json], text: str) -> tuple[int, int, bool]:
        """Returns (prompt tokens, completion tokens, whether both can be believed).

        `said` is the provider's report of the two. What is not in it, or cannot be true, is estimated.
        """
        prompt, completion = map(read_count, said)
        is_odd = any(value and count is None for value, count in zip(said, (prompt, completion), strict=True))
        if is_odd and not self._has_warned:
            self._has_warned = True
            log.warning("%s: its usage is not a number of tokens; tokens and cost are estimated", self.name)
        prompt = prompt or sum(count_tokens(str(message.get("content"))) for message in messages)
        return prompt, completion or count_tokens(text), not is_odd


def classify(status: int, text: str) -> FailureKind:
    """Returns the meaning of an HTTP error status for this call and for later ones."""
    said = text[:MAX_ERROR].lower()
    if status == 402 or (status in (400, 403, 429) and any(words in said for words in _USED_UP)):
        return "used_up"
    if status in (408, 409, 425, 429) or status >= 500:
        return "retry"
    if status == 403 and any(word in said for word in _REFUSED_TEXT):
        return "refused"
    return "stopped" if status in (401, 403, 404, 405) else "refused"


def read_count(value: Any) -> int | None:
    """Returns a number of tokens as a provider reports it, or None when it cannot be true."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:  # NaN is not
        return None
    return int(value)
