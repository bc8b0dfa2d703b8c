"""Judge models' clients: Provider (single calls, no retries), its answers, and error classification."""

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
    "late",  # deadline exceeded; may succeed later
    "unreachable",  # no connection; may succeed later
    "refused",  # permanent for this call, for example a prompt too long for the model
    "too_large",  # the answer is too large; retrying does not help
    "used_up",  # quota exhausted; all calls fail until renewal
    "stopped",  # permanent for all calls, for example a wrong key
]

MAX_MESSAGE = 300  # displayed characters of a provider's error text
MAX_START = 100  # bytes of an answer that is not a completion
MAX_MODEL = 100  # characters of the model name in a reply
MAX_ERROR = 64_000  # processed characters of a provider's error text
MAX_ANSWER = 3_000_000  # characters of an answer; no verdict is longer
MAX_BYTES = 4 << 20  # bytes of a response; 64 attempts with 128k reasoning tokens need a quarter of this
# Brackets and commas in a response. Each may create a Python object; json takes 0.1 s for 200,000 and blocks the loop.
MAX_MARKS = 200_000
ENCODINGS = "gzip, deflate"  # encodings with incremental decompression
LONG_ANSWER = 8_000  # bytes or characters above which an answer is parsed in a thread
MAX_TOKENS = 100_000_000  # tokens per call; larger numbers are implausible
_REFUSED_TEXT = ("moderation", "flagged", "content_filter", "content policy")  # concern this call, not the API key
# Provider error texts for exhausted credit or quota, where short waits do not help.
_USED_UP = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "credit balance is too low")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The model's text without secrets, and the call's metadata."""

    text: str
    finish_reason: str
    usage: Usage
    model: str | None = None  # model named in the reply; may differ from the requested model
    refusal: str = ""  # the model's refusal message, or ""
    pause_s: float = 0.0  # pause requested by the rate-limit headers, in seconds


class CallFailed(Exception):
    """A failed call. The message is a single line without secrets."""

    def __init__(self, message: str, kind: FailureKind, *, retry_after_s: float | None = None) -> None:
        self.kind, self.retry_after_s = kind, retry_after_s
        super().__init__(message)


class Provider:
    """Client for one model. `name` is used in messages."""

    def __init__(self, member: JudgeModelConfig, secrets: Secrets, name: str) -> None:
        self.member, self.secrets, self.name = member, secrets, name
        self.price = find_price(member)
        self._has_warned = False  # about invalid token counts

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        """Makes one call; with `schema`, requests JSON matching the schema. Raises CallFailed."""
        raise NotImplementedError

    def options(self, schema: Json | None) -> Json:
        """Returns the configured parameters, plus a response format for `schema` unless one is configured."""
        options: Json = dict(self.member.params)
        if schema is not None:
            strict = {"name": "verdict", "strict": True, "schema": schema}
            options.setdefault("response_format", {"type": "json_schema", "json_schema": strict})
        return options

    async def close(self) -> None:
        """Closes all connections."""

    def shown(self, text: str) -> str:
        """Returns a provider's error text as a short line without secrets."""
        return printable(" ".join(self.secrets.redact(text[:MAX_ERROR]).split()), limit=MAX_MESSAGE)

    def read_text(self, content: Any) -> str:
        """Returns the reply's content as a single text without secrets. Raises TypeError for invalid content.

        Overlong text is cut to MAX_ANSWER + 1 characters, so the caller can still detect the excess.
        """
        if isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, dict))
            content = "".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str | None):
            raise TypeError(f"content is a {type(content).__name__}")
        return self.secrets.redact(clean((content or "")[: MAX_ANSWER + 1]))

    def read_refusal(self, refusal: Any, reason: Any) -> str:
        """Returns the reply's refusal (or the content filter's name) as a short line; "" if there was no refusal."""
        words = refusal if isinstance(refusal, str) else ""
        return self.shown(words or ("content_filter" if reason == "content_filter" else ""))

    def read_model(self, name: Any) -> str | None:
        """Returns the model named in a reply, if any, sanitized for use in metric names."""
        name = self.secrets.redact(name[:MAX_ERROR]) if isinstance(name, str) else ""
        return re.sub(r"[^A-Za-z0-9_./:@-]", "_", name)[:MAX_MODEL] or None

    def read_tokens(self, said: Sequence[Any], messages: Sequence[Json], text: str) -> tuple[int, int, bool]:
        """Returns (prompt tokens, completion tokens, whether both are plausible); implausible values are estimated."""
        prompt, completion = map(read_count, said)
        is_odd = any(value and count is None for value, count in zip(said, (prompt, completion), strict=True))
        if is_odd and not self._has_warned:
            self._has_warned = True
            log.warning("%s: its usage is not a number of tokens; tokens and cost are estimated", self.name)
        prompt = prompt or sum(count_tokens(str(message.get("content"))) for message in messages)
        return prompt, completion or count_tokens(text), not is_odd


def classify(status: int, text: str) -> FailureKind:
    """Maps an HTTP error status to a failure kind."""
    said = text[:MAX_ERROR].lower()
    if status == 402 or (status in (400, 403, 429) and any(words in said for words in _USED_UP)):
        return "used_up"
    if status in (408, 409, 425, 429) or status >= 500 or status < 300:  # below 300, the body is not a completion
        return "retry"
    if status == 403 and any(word in said for word in _REFUSED_TEXT):
        return "refused"
    return "stopped" if status in (401, 403, 404, 405) or status < 400 else "refused"  # below 400, a redirect


def status_of(error: Any) -> int:
    """Returns the HTTP status that an error object names as its `code`; 500, which may be tried again, without one."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def read_count(value: Any) -> int | None:
    """Returns a reported token count, if plausible."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:  # NaN is not
        return None
    return int(value)
