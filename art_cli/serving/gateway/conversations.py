"""Conversations: assigns calls to conversations, and ends conversations.

A call joins the first match among its client's open conversations:

    the conversation whose name it sends                           X-Art-Conversation, or the name in its key
    the conversation with a failed or lost call that it repeats    an SDK's retry
    the conversation sharing the longest history with replies      continues from there, or branches off
    otherwise a new conversation

Shared history is found by a digest of the messages up to each sampled reply. System messages are ignored, because
clients put the time into them. Two attempts at a task start with the same messages but share no reply, so they become
two conversations. If their replies are also equal, the call joins the conversation without a continuation.

A conversation ends when it has been idle for long enough, is too large, or makes room for others. Ending only means
forgetting: the journal still contains the whole conversation.
"""

import contextlib
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.reading import check_size
from art_cli.chat.replies import input_of
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.config.schema import GatewayConfig
from art_cli.rollouts.recorder import Attempted, Recorded, Retries, identity_of
from art_cli.rollouts.rollout_gateway import Gateway, RecordingBackend
from art_cli.serving.gateway.journal import Journal, Outline
from art_cli.serving.gateway.journaled_recorder import About, JournaledRecorder, scenario_of
from art_cli.serving.gateway.redaction import Redactor

log = logging.getLogger(__name__)

MAX_CALLS = 1000  # maximum calls per conversation, because each call is compared with its predecessors
MAX_BYTES = 128 * 2**20  # maximum memory per conversation; readers accept trajectory lines of up to 256 MB
MB = 1e6
LEFT_OUT = ("system", "developer")


class Conversation:
    def __init__(self, recorder: JournaledRecorder, backend: RecordingBackend, now: float) -> None:
        self.recorder, self.backend = recorder, backend
        self.about = recorder.about
        self.last_at = now  # by time.monotonic()
        self.num_in_flight = 0
        self.is_attached = True  # False: accepts no more calls, because it has ended or is too large
        self.num_counted = 0  # bytes of this conversation included in the total
        self.keys: set[bytes] = set()  # this conversation's index keys
        self.ends: set[bytes] = set()  # keys without a continuation
        self.histories: dict[str, bytes] = {}  # id of a running request -> digest of its messages


class Conversations:
    """All clients' open conversations, longest idle first."""

    def __init__(self, gateway: Gateway, journal: Journal, redactor: Redactor, config: GatewayConfig) -> None:
        self._gateway, self._journal, self._redactor, self._config = gateway, journal, redactor, config
        self.open: OrderedDict[str, Conversation] = OrderedDict()  # id -> conversation
        self.num_bytes = 0
        self._named: dict[tuple[str, str], Conversation] = {}
        # digest of messages up to a reply -> conversations with this reply
        self._index: dict[bytes, list[Conversation]] = {}
        self._retries: dict[str, Retries] = {}  # client -> recent calls
        self._attempted: WeakKeyDictionary[Attempted, str] = WeakKeyDictionary()  # call -> conversation id
        self._is_text_only_told = False

    @contextlib.contextmanager
    def calling(
        self, client: str, request: Request, redacted: Request, prefixes: list[bytes]
    ) -> Iterator[Conversation]:
        """Yields the call's conversation while the call runs. `prefixes` are of the `redacted` request's messages."""
        retries = self._retries.setdefault(client, Retries())
        replaced = retries.replaced(request)
        conversation = self._find(client, redacted, replaced, prefixes) or self._begin(client, redacted)
        attempted = retries.add(request)
        self._attempted[attempted] = conversation.about.id
        conversation.num_in_flight += 1
        conversation.histories[request.id] = prefixes[-1] if prefixes else b""
        self.open.move_to_end(conversation.about.id)
        try:
            yield conversation
            attempted.state = "answered"
        finally:
            attempted.end()
            conversation.histories.pop(request.id, None)
            conversation.num_in_flight -= 1
            self._touch(conversation)

    def restore(self, outline: Outline) -> None:
        by_age = sorted(outline.lines, key=outline.last_at)
        young = [name for name in by_age if time.time() - outline.last_at(name) < self._config.idle_s]
        for name in young[-self._config.max_open :]:
            if entries := outline.read(name):
                first, last = entries[0], entries[-1]
                conversation = self._open(About(first.conversation, first.client, first.name, first.scenario))
                conversation.recorder.replay(entries, conversation.backend.remember)
                conversation.last_at = time.monotonic() - max(0.0, time.time() - last.at)
                self._count(conversation)
                self._make_room()
        log.info("%d earlier conversations continue", len(self.open))

    def end_idle(self) -> None:
        now = time.monotonic()
        for conversation in list(self.open.values()):
            if now - conversation.last_at >= self._config.idle_s and not conversation.num_in_flight:
                self._end(conversation)

    # --- assigning calls ----------------------------------------------------------------------------------------------

    def _find(
        self, client: str, request: Request, replaced: Attempted | None, prefixes: list[bytes]
    ) -> Conversation | None:
        if request.conversation is not None:
            return self._named.get((client, self._redactor.name(request.conversation)))
        is_lost = replaced is not None and replaced.state == "lost"  # an answered call may belong to another attempt
        before = self.open.get(self._attempted.get(replaced, "")) if replaced is not None and is_lost else None
        if before is not None and before.is_attached:
            return before
        if request.messages is None:
            return self._find_text(client, request.prompt)
        for place in reversed(range(len(prefixes))):
            if found := self._index.get(prefixes[place]):
                at_end = [conversation for conversation in found if prefixes[place] in conversation.ends]
                chosen = (at_end or found)[-1]
                chosen.ends.discard(prefixes[place])
                return chosen
        return None

    def _find_text(self, client: str, prompt: str | list[int] | None) -> Conversation | None:
        """Returns the conversation that a plain prompt continues; token ids have no text and start a new one."""
        if not isinstance(prompt, str):
            return None
        for conversation in reversed(self.open.values()):
            is_its = conversation.about.client == client and conversation.is_attached
            if is_its and conversation.recorder.is_continued_by(prompt):
                return conversation
        return None

    def _begin(self, client: str, request: Request) -> Conversation:
        name = None if request.conversation is None else self._redactor.name(request.conversation)
        redacted = None if request.scenario is None else self._redactor.name(request.scenario)
        scenario = scenario_of(msgspec.structs.replace(request, scenario=redacted))
        return self._open(About(uuid.uuid4().hex, client, name, scenario))

    def _open(self, about: About) -> Conversation:
        recorder = JournaledRecorder(about, self._redactor, self._journal.append)
        backend = RecordingBackend(self._gateway, about.id, Sampling(), recorder, group_id=about.id)
        conversation = Conversation(recorder, backend, time.monotonic())
        recorder.on_call = partial(self._note, conversation)
        self.open[about.id] = conversation
        if about.name is not None:
            self._named[about.client, about.name] = conversation
        return conversation

    def _note(self, conversation: Conversation, request: Request, recorded: Recorded) -> None:
        """Adds a recorded call's replies to the index."""
        if request.messages is None or not conversation.is_attached:
            return
        client = conversation.about.client
        before = conversation.histories.get(request.id) or prefixes_of(client, request.messages)[-1]
        for each in recorded.conversations:
            key = _extended(before, each.messages[-1])
            conversation.ends.add(key)
            if key not in conversation.keys:
                conversation.keys.add(key)
                self._index.setdefault(key, []).append(conversation)

    # --- ending conversations -----------------------------------------------------------------------------------------

    def _touch(self, conversation: Conversation) -> None:
        """Records that a call has ended, and makes room."""
        recorder = conversation.recorder
        conversation.last_at = time.monotonic()
        if recorder.has_foreign_replies and not self._is_text_only_told:
            self._is_text_only_told = True
            log.warning(
                "the endpoint reports no token ids: its calls are text only, for art judge and not for art step"
            )
        self.open.move_to_end(conversation.about.id)
        self._count(conversation)
        is_empty = recorder.num_entries == 0
        if recorder.num_entries >= MAX_CALLS or recorder.num_bytes >= MAX_BYTES:
            self._detach(conversation)
        if not conversation.num_in_flight and (is_empty or not conversation.is_attached):
            self._end(conversation)
        self._make_room()

    def _count(self, conversation: Conversation) -> None:
        self.num_bytes += conversation.recorder.num_bytes - conversation.num_counted
        conversation.num_counted = conversation.recorder.num_bytes

    def _make_room(self) -> None:
        if not self._is_crowded():
            return
        for conversation in [each for each in self.open.values() if not each.num_in_flight]:
            self._end(conversation)
            if not self._is_crowded():
                return

    def _is_crowded(self) -> bool:
        return len(self.open) > self._config.max_open or self.num_bytes > self._config.max_open_mb * MB

    def _end(self, conversation: Conversation) -> None:
        """Forgets a conversation without running calls."""
        self._detach(conversation)
        del self.open[conversation.about.id]
        self.num_bytes -= conversation.num_counted

    def _detach(self, conversation: Conversation) -> None:
        conversation.is_attached, about = False, conversation.about
        if about.name is not None and self._named.get((about.client, about.name)) is conversation:
            del self._named[about.client, about.name]
        for key in conversation.keys:
            others = [each for each in self._index[key] if each is not conversation]
            if others:
                self._index[key] = others
            else:
                del self._index[key]
        conversation.keys.clear()


def prefixes_of(client: str, messages: Sequence[Json]) -> list[bytes]:
    """Returns cumulative digests of client and messages, ignoring system messages."""
    digest = hashlib.blake2b(client.encode(), digest_size=16).digest()
    found = []
    for message in messages:
        if message.get("role") not in LEFT_OUT:
            digest = _extended(digest, message)
        found.append(digest)
    return found


def _extended(digest: bytes, message: Json) -> bytes:
    role, text, answers, calls = identity_of(message)
    parts = [role, str(text).strip(), answers, [_call(*call) for call in calls]]  # type: ignore[attr-defined]
    return hashlib.blake2b(digest + msgspec.json.encode(parts), digest_size=16).digest()


def _call(name: str, arguments: str | None) -> list[object]:
    """Returns a canonical tool call: spaces, key order, and 1 or 1.0 do not matter, unless it is too large."""
    try:
        check_size((arguments or "").encode(errors="replace"))
    except ChatError:
        return [name, arguments]
    return [name, msgspec.json.encode(_whole(input_of(arguments or "")), order="deterministic").decode()]


def _whole(value: object) -> object:
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
