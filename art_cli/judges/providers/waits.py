"""Parses the wait requested by a provider, from all common headers, formats and units. Pure except for the clock.

Retry-After: 30
Retry-After: Wed, 21 Oct 2026 07:28:00 GMT
x-ratelimit-reset-requests: 1m3s
anthropic-ratelimit-tokens-reset: 2026-10-21T07:28:00Z
x-ratelimit-reset: 1792567680000
"retryDelay": "34s" or "try again in 7m12s" in an error's text
"""

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_TEXT = 20_000  # searched characters of an error text
_MAX_VALUE = 64  # parsed characters of a header value
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPOCH_S, _EPOCH_MS = (1e9, 1e10), (1e12, 1e13)  # timestamps (years 2001 to 2286) rather than durations
_SAID = re.compile(r'(?:"retryDelay":\s?"|(?:try again|retry) (?:in|after) )([0-9][0-9.hms]{0,40})', re.IGNORECASE)
# (remaining header, reset header) for OpenAI-compatible providers, Anthropic, OpenRouter, and the IETF draft
_LIMITS = (
    *((f"x-ratelimit-remaining-{what}", f"x-ratelimit-reset-{what}") for what in ("requests", "tokens")),
    *(
        (f"anthropic-ratelimit-{what}-remaining", f"anthropic-ratelimit-{what}-reset")
        for what in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
    ("ratelimit-remaining", "ratelimit-reset"),
)


def retry_after(headers: Mapping[str, str], text: str = "") -> float | None:
    """Returns the requested wait in seconds, from the headers or the error text, if present."""
    milliseconds = read_wait(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    seconds = read_wait(headers.get("retry-after", ""))
    if seconds is None:
        seconds = quiet_time(headers) or None
    if seconds is None and (said := _SAID.search(text[:MAX_TEXT])):
        seconds = read_wait(said[1].rstrip("."))
    return seconds


def quiet_time(headers: Mapping[str, str]) -> float:
    """Returns the seconds until exhausted rate limits reset; 0 if no limit is exhausted.

    Example: remaining-requests "0" and reset-requests "1m3s" -> 63.
    """
    used_up = (reset for remaining, reset in _LIMITS if headers.get(remaining, "").strip() == "0")
    return max((read_wait(headers.get(reset, "")) or 0.0 for reset in used_up), default=0.0)


def read_wait(value: str) -> float | None:
    """Parses a number, duration or timestamp to seconds from now (0 if past), if valid."""
    value = value.strip()[:_MAX_VALUE]
    if _NUMBER.fullmatch(value):
        number = float(value)
        if _EPOCH_S[0] <= number < _EPOCH_S[1]:
            return max(0.0, number - time.time())
        if _EPOCH_MS[0] <= number < _EPOCH_MS[1]:
            return max(0.0, number / 1000 - time.time())
        return number
    parts = _DURATION.findall(value)
    if parts and "".join(map("".join, parts)) == value:
        return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return _read_time(value)


def _read_time(value: str) -> float | None:
    """Returns seconds until an HTTP date or an RFC 3339 timestamp."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(value)
            aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
            return max(0.0, aware.timestamp() - time.time())
        except (ValueError, TypeError, LookupError, OverflowError):
            continue
    return None


def until(seconds: float) -> str:
    """Describes when a wait ends. Example: until(86400) -> "until 2026-10-22 07:28 UTC (24 h)"."""
    hours = f"{seconds / 3600:,.0f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
    short = f"{seconds:.0f} s" if seconds < 120 else hours
    try:
        moment = datetime.fromtimestamp(time.time() + seconds).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"for {seconds:.3g} s"
    return f"until {moment:%H:%M:%S} ({short})" if seconds < 3600 else f"until {moment:%Y-%m-%d %H:%M %Z} ({short})"
