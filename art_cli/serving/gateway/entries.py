"""Entry: one line of the journal. A conversation's entries, read in the order of their numbers, give its recorder back.

A call holds only what it adds to the conversation that was recorded before it: messages after the first `kept` ones,
token ids of the prompt after the first `prompt_kept` ones. So a conversation of n calls takes as much room as its last.
"""

from array import array

import msgspec

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.rollouts.recorder import common_prefix
from art_cli.runs.trajectory import SCHEMA_VERSION


class CapturedCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parts of one answered call that a recorder takes, redacted.

    Example, a conversation's second call: CapturedCall(kept=2, messages=[{"role": "user", "content": "again?"}], ...)
    """

    kept: int = 0  # number of leading messages that are those of the conversation recorded last, its reply included
    messages: list[Json] | None = None  # the messages after them; None for a plain completion
    prompt: str | list[int] | None = None
    tools: list[Json] = []  # the tools that no earlier call of the conversation offered
    overridden: Json = {}
    state: str | None = None
    digest: str = ""  # hexadecimal digits of Request.digest, by which a retry is known after a restart
    num_retries: int = 0
    prompt_kept: int = 0  # number of leading token ids of the prompt that are those of the last turn's sequence
    reply: Reply  # its prompt_ids are the ids after them
    is_left: bool = False  # the client left before the end


class JournalEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line: a call, or a call that the client gave up.

    Example: JournalEntry(conversation="4f0c...", number=3, at=1764.2, abandons=2): by the fourth entry the reply
    in the third was never seen.
    """

    schema_version: int = SCHEMA_VERSION
    conversation: str  # id, which becomes the trajectory's
    number: int  # position among the entries of its conversation, from 0
    at: float  # seconds since the epoch
    client: str = ""  # "key 2"; the key itself is written nowhere
    name: str | None = None  # the client's own name for the conversation
    scenario: str = ""  # the id that attempts at the same task share
    call: CapturedCall | None = None
    abandons: int | None = None  # number of the entry whose call the client gave up and made again


class Head(msgspec.Struct):
    """The fields of a JournalEntry that an outline of a journal needs; the others are skipped."""

    conversation: str
    number: int
    at: float
    schema_version: int = SCHEMA_VERSION
    scenario: str = ""


def call_of(
    request: Request, reply: Reply, *, last: list[Json], sequence: bytes, seen: list[Json], is_left: bool
) -> CapturedCall:
    """Makes the entry of a call. `last` are the messages recorded last, `sequence` the last turn's packed ids, `seen`
    the tools of earlier calls."""
    prompt = array("I", reply.prompt_ids).tobytes()
    prompt_kept = common_prefix(prompt, sequence)
    kept = 0 if request.messages is None else _count_equal(request.messages, last)
    choices = [msgspec.structs.replace(choice, tokens=[], top_logprobs=None, echo=None) for choice in reply.choices]
    return CapturedCall(
        kept=kept,
        messages=None if request.messages is None else request.messages[kept:],
        prompt=request.prompt,
        tools=[tool for tool in request.tools if tool not in seen],
        overridden=request.overridden,
        state=request.state,
        digest=request.digest.hex(),
        num_retries=request.num_retries,
        prompt_kept=prompt_kept,
        reply=msgspec.structs.replace(
            reply,
            prompt_ids=reply.prompt_ids[prompt_kept:],
            choices=choices,
            sampling=reply.sampling or request.sampling,
        ),
        is_left=is_left,
    )


def request_of(call: CapturedCall, *, last: list[Json]) -> Request:
    """Returns the request of a call, as far as a recorder reads it."""
    return Request(
        model="",
        sampling=Sampling(),
        messages=None if call.messages is None else [*last[: call.kept], *call.messages],
        prompt=call.prompt,
        tools=call.tools,
        overridden=call.overridden,
        state=call.state,
        digest=bytes.fromhex(call.digest),
        num_retries=call.num_retries,
    )


def reply_of(call: CapturedCall, *, sequence: bytes) -> Reply:
    """Returns the reply of a call. Raises msgspec.ValidationError: its sampling is none."""
    before = array("I", sequence)[: call.prompt_kept].tolist()
    return msgspec.structs.replace(
        call.reply,
        prompt_ids=[*before, *call.reply.prompt_ids],
        sampling=msgspec.convert(call.reply.sampling, Sampling),
    )


def _count_equal(messages: list[Json], last: list[Json]) -> int:
    """Counts the messages that are equal at the beginning of both."""
    pairs = enumerate(zip(messages, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(messages), len(last)))
