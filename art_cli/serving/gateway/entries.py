"""Journal entries. Replaying a conversation's entries in numerical order restores its recorder.

A call only stores what it adds to the previously recorded call: messages after the first `kept`, and prompt token ids
after the first `prompt_kept`. A conversation of n calls therefore takes as much space as its last call.
"""

from array import array

import msgspec

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.rollouts.recorder import common_prefix
from art_cli.runs.trajectory import SCHEMA_VERSION


class CapturedCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The recorded parts of an answered call, redacted.

    Example, a conversation's second call: CapturedCall(kept=2, messages=[{"role": "user", "content": "again?"}], ...)
    """

    kept: int = 0  # number of leading messages shared with the last recorded conversation, including its reply
    messages: list[Json] | None = None  # the remaining messages; None for plain completions
    prompt: str | list[int] | None = None
    tools: list[Json] = []  # tools not offered in earlier calls of this conversation
    overridden: Json = {}
    state: str | None = None
    digest: str = ""  # hexadecimal Request.digest, to recognize retries after a restart
    num_retries: int = 0
    prompt_kept: int = 0  # number of leading prompt token ids shared with the last turn's sequence
    reply: Reply  # `prompt_ids` contains the remaining ids
    is_left: bool = False  # the client disconnected early


class _EntryFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    schema_version: int = SCHEMA_VERSION
    conversation: str  # id, also used for the trajectory
    number: int  # position in the conversation, from 0
    at: float  # seconds since the epoch
    client: str = ""  # "key 2"; keys are never written
    name: str | None = None  # the client's name for the conversation
    scenario: str = ""  # id shared by attempts at the same task


class JournalEntry(_EntryFields, kw_only=True):
    """A journal line: a call, or a note that the client gave up a call.

    Example: JournalEntry(conversation="4f0c...", number=3, at=1764.2, abandons=2): the client never saw the reply of
    entry 2.
    """

    call: CapturedCall | None = None
    abandons: int | None = None  # number of the entry whose call the client gave up and repeated


class _ReplyHead(msgspec.Struct):
    id: str
    policy: str = ""


class _CallHead(msgspec.Struct):
    reply: _ReplyHead


class Head(_EntryFields, kw_only=True):
    """The fields of a JournalEntry needed for an outline; other fields are skipped."""

    call: _CallHead | None = None


def call_of(
    request: Request, reply: Reply, *, last: list[Json], sequence: bytes, seen: list[Json], is_left: bool
) -> CapturedCall:
    """Creates the entry for a call. `last` are the previously recorded messages, `sequence` the last turn's packed ids,
    and `seen` the tools of earlier calls."""
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
            id=request.id or reply.id,
            prompt_ids=reply.prompt_ids[prompt_kept:],
            choices=choices,
            sampling=reply.sampling or request.sampling,
        ),
        is_left=is_left,
    )


def request_of(call: CapturedCall, *, last: list[Json]) -> Request:
    """Restores the recorded parts of a call's request."""
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
    """Restores a call's reply. Raises msgspec.ValidationError for invalid sampling settings."""
    before = array("I", sequence)[: call.prompt_kept].tolist()
    return msgspec.structs.replace(
        call.reply,
        prompt_ids=[*before, *call.reply.prompt_ids],
        sampling=msgspec.convert(call.reply.sampling, Sampling),
    )


def _count_equal(messages: list[Json], last: list[Json]) -> int:
    pairs = enumerate(zip(messages, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(messages), len(last)))
