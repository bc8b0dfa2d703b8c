"""Memory: replies that a client may refer to by their ids, instead of sending the conversation again.

OpenAI's Responses keep a response unless the client sends `store: false`, and take its id as `previous_response_id`, or
the id of one of its items as an `item_reference`. What is kept belongs to one backend and one key: in the gateway to
one rollout, with which it ends. It is in memory only, and the oldest go first.
"""

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request
from art_cli.chat.wires.responses_items import conversation, without_instructions

Json = dict[str, Any]

MAX_REPLIES = 1000
MAX_BYTES = 16 * 2**20  # size of all conversations that are kept, as JSON; an agent's 100 turns of 100 KB are 10 MB


class _Kept(NamedTuple):
    """A conversation up to and with one reply, without the instructions of its call."""

    messages: list[Json]
    num_bytes: int


class Memory:
    """The conversations kept for the clients of one backend."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()  # digest of the key, id -> conversation
        self._num_bytes = 0

    def recall(self, request: Request, key: str | None) -> Request:
        """Returns the request with its whole conversation. Raises ChatError 400 if that is not kept."""
        messages = request.messages
        if messages is None or (request.previous is None and not any("reply_id" in sent for sent in messages)):
            return request
        ids = [sent["reply_id"] for sent in messages if "reply_id" in sent]
        if len(set(ids)) < len(ids):  # a short body would otherwise become an endless conversation
            raise invalid("input: it refers to one response in two places", "input")
        resolved = [self._find(key, sent["reply_id"])[-1] if "reply_id" in sent else sent for sent in messages]
        before = [] if request.previous is None else self._find(key, request.previous)
        resolved = [*before, *without_instructions(request.instructions, resolved)]
        return msgspec.structs.replace(request, messages=conversation(request.instructions, resolved))

    def keep(self, request: Request, key: str | None, reply: Reply) -> None:
        """Keeps the reply to a request that was recalled."""
        if not request.is_kept or request.messages is None:
            return
        answer = {"role": "assistant", **(reply.choices[0].message or {"content": reply.choices[0].text})}
        messages = [*without_instructions(request.instructions, request.messages), answer]
        kept = _Kept(messages, len(msgspec.json.encode(messages)))
        if kept.num_bytes > MAX_BYTES:
            return
        self._kept[_owner(key), request.id] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > MAX_BYTES or len(self._kept) > MAX_REPLIES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _find(self, key: str | None, id: str) -> list[Json]:
        kept = self._kept.get((_owner(key), id))
        if kept is None:
            raise _not_kept()
        return kept.messages


def _owner(key: str | None) -> bytes:
    return hashlib.blake2b((key or "").encode(errors="surrogateescape"), digest_size=16).digest()


def _not_kept() -> ChatError:
    message = "the response that this request refers to is not, or no longer, kept here; send the conversation as input"
    return invalid(message, "previous_response_id", "previous_response_not_found")
