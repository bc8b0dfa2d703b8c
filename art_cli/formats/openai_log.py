"""OpenAI-style logs: conversations as `messages` lines, and single calls as request and response.

    {"messages": [...], "tools": [...], "reward": 1.0, "group_id": "easy-17"}     a whole conversation
    {"request": {"messages": [...]}, "response": {"choices": [...]}}              one call of a conversation

A call may also be one of OpenAI's Responses or of Anthropic's Messages (protocols.py). Calls whose messages go on from
an earlier call's reply are one attempt, even without a key. `record_of` writes the first form.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from art_cli.chat.wires.responses_items import without_instructions
from art_cli.formats.imported_attempt import (
    TracedAttempt,
    TracedCall,
    as_list,
    as_number,
    as_object,
    named,
    numbers,
    plain_message,
)
from art_cli.formats.protocols import call_of
from art_cli.runs.trajectory import Json, Trajectory

REQUESTS = ("request", "request_body", "body", "input", "kwargs")
RESPONSES = ("response", "response_body", "completion", "output")
SESSIONS = ("session_id", "trace_id", "conversation_id", "thread_id", "run_id")
GROUPS = ("group_id", "scenario_id", "scenario", "task_id", "prompt_id")


class OpenAILog:
    name = "openai"
    about = "lines with `messages`, or with a request and its response"

    def __init__(self) -> None:
        self._open: dict[str, TracedAttempt] = {}  # attempts that more calls may belong to, by session or number
        self._ends: dict[bytes, deque[str]] = defaultdict(deque)  # hash of a conversation -> attempts that it ends
        self._kept: dict[str, list[Json]] = {}  # id of a response -> its conversation, which a later call may name

    @staticmethod
    def recognises(record: Json) -> bool:
        if isinstance(record.get("messages"), list):
            return True
        return _request(record) is not None and _response(record) is not None

    def read(self, record: Json, group: str | None = None) -> TracedAttempt | None:
        if "group_size" in record and "turns" in record:
            raise ValueError("a trajectory of art's own, which art judge, art step and art sft take as it is")
        request, response = _request(record), _response(record)
        if response is None or request is None:
            return _conversation(record, group)
        call = call_of(request, response, self._kept)
        conversation = [*(call.messages or ()), call.message or {}]
        if isinstance(response.get("output"), list) and isinstance(id := response.get("id"), str):
            self._kept[id] = without_instructions(request.get("instructions"), conversation)
        name = self._session(record, call)
        attempt = self._open.get(name)
        if attempt is None:
            attempt = _about(record, group)
        attempt.add(call)
        self._open[name] = attempt
        self._ends[_digests(conversation)[-1]].append(name)
        attempt.reward = attempt.reward if as_number(record.get("reward")) is None else as_number(record["reward"])
        return None

    def finish(self) -> Iterator[TracedAttempt]:
        yield from self._open.values()

    def _session(self, record: Json, call: TracedCall) -> str:
        """Returns the attempt that a call belongs to: by a key of the line, or because it goes on from a reply of
        it."""
        metadata = record.get("metadata") if isinstance(record.get("metadata"), dict) else {}
        for source in (record, metadata or {}):
            for key in SESSIONS:
                if isinstance(source.get(key), str | int):
                    return f"{key} {source[key]}"
        messages = list(call.messages or ())
        for digest in reversed(_digests(messages)[:-1]):
            if names := self._ends.get(digest):
                return names.popleft()
        return f"call {len(self._open)}"


def _conversation(record: Json, group: str | None) -> TracedAttempt:
    """Returns a line of `messages`. Raises ValueError if there is no assistant's among them."""
    messages = [plain_message(each) for each in as_list(record.get("messages"), "messages")]
    attempt = _about(record, group)
    tools = as_list(record.get("tools"), "tools")
    for branch in [*as_list(record.get("branches"), "branches"), messages]:
        sent = [plain_message(each) for each in as_list(branch, "branches")]
        if not any(each["role"] == "assistant" for each in sent):
            raise ValueError("no assistant message")
        attempt.add(TracedCall(sent[:-1], sent[-1], tools))
    return attempt


def _about(record: Json, group: str | None) -> TracedAttempt:
    task = record.get("scenario") if isinstance(record.get("scenario"), dict) else {}
    scenario = group or named(record, GROUPS)
    error = record.get("error")
    return TracedAttempt(
        id=named(record, ("id",)),
        scenario=named(task or {}, ("id",)) if scenario is None else scenario,
        task=dict(task or {}),
        reward=as_number(record.get("reward")),
        metrics=numbers(as_object(record.get("metrics"), "metrics")),
        metadata=as_object(record.get("metadata"), "metadata"),
        error=error if isinstance(error, str) and error else None,
    )


def _request(record: Json) -> Json | None:
    for key in REQUESTS:
        if isinstance(found := record.get(key), dict):
            inner = found.get("body")
            return inner if isinstance(inner, dict) else found
    return record if ("messages" in record or "input" in record) and _response(record) is not None else None


def _response(record: Json) -> Json | None:
    for key in RESPONSES:
        if isinstance(found := record.get(key), dict):
            inner = found.get("body")
            return inner if isinstance(inner, dict) else found
    return None


def _digests(messages: Sequence[Json]) -> list[bytes]:
    """For each message, a hash of the conversation up to it, of what a client keeps when it sends it back."""
    digests, before = [], b""
    for m in messages:
        kept = [m.get("role"), m.get("content") or "", m.get("tool_call_id"), _names(m.get("tool_calls"))]
        text = json.dumps(kept, sort_keys=True).encode("utf-8", "replace")
        before = hashlib.sha256(before + text).digest()
        digests.append(before)
    return digests


def _names(calls: Any) -> list[Any]:
    """Names and arguments of tool calls; a client may write the same arguments in another way, so they are parsed."""
    found = []
    for call in calls or []:
        function = call["function"]
        try:
            found.append([function["name"], json.loads(function["arguments"])])
        except (ValueError, RecursionError):
            found.append([function["name"], function["arguments"]])
    return found


def record_of(trajectory: Trajectory) -> Json:
    """Returns a trajectory as one line of `messages`; its tokens are left out, because the form has no place for
    them."""
    record: Json = {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "scenario": trajectory.scenario,
        "messages": trajectory.messages,
    }
    optional = {
        "branches": trajectory.branches,
        "tools": trajectory.tools,
        "reward": trajectory.returned_reward,
        "metrics": trajectory.metrics,
        "metadata": trajectory.metadata,
        "error": trajectory.error,
    }
    return record | {key: value for key, value in optional.items() if value not in (None, [], {})}
