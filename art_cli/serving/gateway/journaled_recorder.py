"""JournaledRecorder: a Recorder that first writes each call to the journal, redacted.

`trajectory_of` replays a conversation's entries and returns its trajectory, with scenario and group.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Json, Request
from art_cli.config.schema import RedactConfig
from art_cli.rollouts.recorder import Recorded, Recorder
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import describe
from art_cli.runtime.secrets import Secrets
from art_cli.serving.gateway.entries import CapturedCall, JournalEntry, call_of, reply_of, request_of
from art_cli.serving.gateway.redaction import Redactor

log = logging.getLogger(__name__)

# Writes a line and returns its length. Raises ChatError 503 on failure.
Write = Callable[[JournalEntry], int]
OBJECTS_PER_BYTE = 3  # approximate memory in bytes of Python objects per byte of JSON
UNREADABLE = "journal: no call of this conversation can be read"  # Trajectory.error
NOTHING = Redactor(RedactConfig(), Secrets([]))  # entries are already redacted


class About(NamedTuple):
    """Identifies a conversation. Example: About("4f0c...", client="key 2", name=None, scenario="9a31...")"""

    id: str
    client: str
    name: str | None
    scenario: str


class JournaledRecorder(Recorder):
    """Records redacted calls. If a call cannot be written, it is not recorded and its client gets an error."""

    def __init__(self, about: About, redactor: Redactor, write: Write) -> None:
        super().__init__()
        self.about = about
        self.num_bytes = 0  # estimated memory use
        self.num_text_only = 0  # calls recorded without token ids
        self.has_foreign_replies = False  # the endpoint did not report token ids
        self.on_call: Callable[[Request, Recorded], None] | None = None  # called with each recorded call, redacted
        self._redactor = redactor
        self._write = write
        self._entries: list[Recorded | None] = []  # the turns of each journal entry
        self._is_leaving = False

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def is_continued_by(self, prompt: str) -> bool:
        """Returns True if the prompt continues the text of a plain completion."""
        return any(each.text and prompt.startswith(each.text) for each in self._conversations)

    # --- interface of RecordingBackend --------------------------------------------------------------------------------

    def record(self, request: Request, reply: Reply) -> Recorded:
        """Raises ChatError 503 if the call cannot be written."""
        self.has_foreign_replies |= not reply.prompt_ids
        request, reply = self._redacted(request, reply)
        call = call_of(
            request, reply, last=self._last(), sequence=self._sequence(), seen=self.tools, is_left=self._is_leaving
        )
        num_bytes = self._append(call=call)
        return self._take(request, reply, num_bytes)

    def leave(self, request: Request, reply: Reply | None) -> Recorded | None:
        """Like Recorder.leave. Write failures are only logged, because the client has disconnected."""
        self._is_leaving = True
        try:
            return super().leave(request, reply)
        except ChatError as error:
            log.warning("a call whose client left is not recorded: %s", error.message)
            return None
        finally:
            self._is_leaving = False

    def abandon(self, recorded: Recorded) -> None:
        number = next((number for number, each in enumerate(self._entries) if each is recorded), None)
        if number is not None:
            self._append(abandons=number)
            self._entries.append(None)
        super().abandon(recorded)

    # --- the journal --------------------------------------------------------------------------------------------------

    def replay(
        self, entries: Iterable[JournalEntry], on_call: Callable[[Request, Recorded], None] | None = None
    ) -> None:
        """Restores the recorder from journal entries in order. Entries that cannot be recorded are left out."""
        for number, entry in enumerate(entries):
            try:
                if (call := entry.call) is not None:
                    request, reply = request_of(call, last=self._last()), reply_of(call, sequence=self._sequence())
                    self.num_cancelled += call.is_left
                    taken = self._take(request, reply, len(msgspec.json.encode(call)))
                    if on_call is not None:
                        on_call(request, taken)
                    continue
                if entry.abandons is not None and (recorded := self._entries[entry.abandons]) is not None:
                    super().abandon(recorded)
            except Exception as error:  # the boundary to what an endpoint sent, or another version wrote
                log.warning("entry %d of conversation %s is left out: %s", number, self.about.id, describe(error))
            self._entries[number:] = [None]

    def _append(self, *, call: CapturedCall | None = None, abandons: int | None = None) -> int:
        id, client, name, scenario = self.about
        return self._write(
            JournalEntry(
                conversation=id,
                number=len(self._entries),
                at=time.time(),
                client=client,
                name=name,
                scenario=scenario,
                call=call,
                abandons=abandons,
            )
        )

    def _take(self, request: Request, reply: Reply, num_bytes: int) -> Recorded:
        num_conversations = len(self._conversations)
        try:
            recorded = super().record(request, reply)
        except Exception:
            self._entries.append(None)  # its line is written, so the next one has the next number
            raise
        self._entries.append(recorded)
        self.num_text_only += not recorded.turns
        self.num_bytes += OBJECTS_PER_BYTE * num_bytes + sum(len(self._sequences[turn]) for turn in recorded.turns)
        if num_conversations and len(self._conversations) > num_conversations:  # a branch is written whole
            self.num_bytes += len(msgspec.json.encode(recorded.conversations[0].messages))
        if self.on_call is not None:
            self.on_call(request, recorded)
        return recorded

    def _last(self) -> list[Json]:
        return self._conversations[-1].messages if self._conversations else []

    def _sequence(self) -> bytes:
        return self._sequences[-1] if self._sequences else b""

    # --- redaction ----------------------------------------------------------------------------------------------------

    def _redacted(self, request: Request, reply: Reply) -> tuple[Request, Reply]:
        """Redacts a call. If anything is replaced, token ids and logprobs are dropped from the reply."""
        redact, prompt = self._redactor, request.prompt
        messages = None if request.messages is None else redact.messages(request.messages)
        tools, overridden = redact.messages(request.tools), redact.value(request.overridden)
        is_readable = not isinstance(prompt, list) or not redact.has_rules  # rules cannot read token ids
        shown = redact.prompt(prompt) if isinstance(prompt, str) else prompt if is_readable else []
        state = None if request.state is None else redact.text(request.state)
        choices = [self._redacted_choice(choice) for choice in reply.choices]
        pairs: list[tuple[object, object]] = [(messages, request.messages), (tools, request.tools), (shown, prompt)]
        pairs += zip(choices, reply.choices, strict=True)
        request = msgspec.structs.replace(
            request, messages=messages, tools=tools, prompt=shown, overridden=overridden, state=state
        )
        if all(one is other for one, other in pairs):
            return request, reply
        choices = [msgspec.structs.replace(c, token_ids=[], logprobs=[], raw_logprobs=None) for c in choices]
        return request, msgspec.structs.replace(reply, choices=choices, prompt_ids=[], usage=reply.num_tokens)

    def _redacted_choice(self, choice: Choice) -> Choice:
        message = None if choice.message is None else self._redactor.value(choice.message)
        text = self._redactor.text(choice.text)
        if message is choice.message and text is choice.text:
            return choice
        return msgspec.structs.replace(choice, message=message, text=text)


class PlaceInGroup(NamedTuple):
    """A trajectory's position in its group. Example: PlaceInGroup("9a31...-195028-0", group_size=4, position=2)"""

    group_id: str
    group_size: int
    position: int  # starts at 0


def scenario_of(request: Request) -> str:
    """Returns the scenario shared by attempts at a task: the client's name for it, or a digest of the initial messages.

    These are all messages up to the first user message: system prompt and question. `request` is redacted.
    """
    if request.scenario:
        return request.scenario
    beginning: object = request.prompt
    if request.messages is not None:
        first = next((place for place, sent in enumerate(request.messages) if sent.get("role") == "user"), 0)
        beginning = [[sent.get("role"), sent.get("content")] for sent in request.messages[: first + 1]]
    return hashlib.sha256(msgspec.json.encode(beginning)).hexdigest()[:16]


def places(scenarios: Mapping[str, str], *, group_size: int, file: str) -> dict[str, PlaceInGroup]:
    """Returns each conversation's group and index. `scenarios`: conversation -> scenario; `file`: timestamp.

    All attempts at a scenario in a file are divided evenly into groups of up to `group_size`. Group ids include the
    file's timestamp, so several files can be combined.
    """
    by_scenario: dict[str, list[str]] = {}
    for conversation, scenario in scenarios.items():
        by_scenario.setdefault(scenario, []).append(conversation)
    found = {}
    for scenario, members in by_scenario.items():
        num_groups = math.ceil(len(members) / group_size)
        bounds = [len(members) * number // num_groups for number in range(num_groups + 1)]
        for number, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            for position, conversation in enumerate(members[start:end]):
                found[conversation] = PlaceInGroup(f"{scenario}-{file}-{number}", end - start, position)
    return found


def trajectory_of(entries: Sequence[JournalEntry], place: PlaceInGroup) -> Trajectory:
    """Returns the trajectory of a conversation from its entries (at least one, in numerical order)."""
    first, last = entries[0], entries[-1]
    recorder = JournaledRecorder(About(first.conversation, first.client, first.name, first.scenario), NOTHING, _refuse)
    recorder.replay(entries)
    calls = [entry.call for entry in entries if entry.call is not None and entry.call.messages is not None]
    replies = {call.reply.id: call.kept + len(call.messages or ()) for call in calls}  # id -> messages before the reply
    about: Json = {"client": first.client, "text_only_calls": recorder.num_text_only, "replies": replies}
    return Trajectory(
        id=first.conversation,
        group_id=place.group_id,
        group_size=place.group_size,
        index=place.position,
        step=max((turn.step for turn in recorder.turns), default=0),
        scenario={"id": first.scenario},
        error=None if recorder.messages else UNREADABLE,
        messages=recorder.messages,
        branches=recorder.branches,
        tools=recorder.tools,
        turns=recorder.turns,
        metrics=recorder.metrics(),
        metadata=about if first.name is None else {**about, "conversation": first.name},
        started_at=first.at,
        duration_s=max(0.0, last.at - first.at),
    )


def _refuse(entry: JournalEntry) -> int:
    raise AssertionError("what is replayed is written already")
