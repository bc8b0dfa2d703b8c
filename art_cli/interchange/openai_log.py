"""OpenAI-style logs: conversations as `messages` lines, and single calls as request and response.

    {"messages": [...], "tools": [...], "reward": 1.0, "group_id": "easy-17"}     a whole conversation
    {"request": {"messages": [...]}, "response": {"choices": [...]}}              one call of a conversation

Calls whose messages go on from an earlier call's reply are one attempt, also where no key says so. A reply of vLLM with
`return_token_ids` and `logprobs` has the tokens. `record_of` writes the first form.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from art_cli.interchange.attempt import (
    Attempt,
    Call,
    Tokens,
    as_list,
    as_number,
    as_object,
    numbers,
    plain_message,
    sampling_of,
)
from art_cli.trajectory import Json, Trajectory

REQUESTS = ("request", "request_body", "body", "input", "kwargs")
RESPONSES = ("response", "response_body", "completion", "output")
SESSIONS = ("session_id", "trace_id", "conversation_id", "thread_id", "run_id")
GROUPS = ("group_id", "scenario_id", "scenario", "task_id", "prompt_id")


class OpenAILog:
    name = "openai"
    about = "lines with `messages`, or with a request and its response"

    def __init__(self) -> None:
        self._open: dict[str, Attempt] = {}  # attempts that more calls may belong to, by session or number
        self._ends: dict[bytes, deque[str]] = defaultdict(deque)  # hash of a conversation -> attempts that it ends

    @staticmethod
    def recognises(record: Json) -> bool:
        if isinstance(record.get("messages"), list):
            return True
        return _request(record) is not None and _response(record) is not None

    def read(self, record: Json, group: str | None = None) -> Attempt | None:
        if "group_size" in record and "turns" in record:
            raise ValueError("a trajectory of art's own, which art judge, art step and art sft take as it is")
        request, response = _request(record), _response(record)
        if response is None or request is None:
            return _conversation(record, group)
        call = call_of(request, response)
        name = self._session(record, call)
        attempt = self._open.get(name)
        if attempt is None:
            attempt = _about(record, group)
        attempt.add(call)
        self._open[name] = attempt
        self._ends[_digests([*(call.messages or ()), call.message or {}])[-1]].append(name)
        attempt.reward = attempt.reward if as_number(record.get("reward")) is None else as_number(record["reward"])
        return None

    def finish(self) -> Iterator[Attempt]:
        yield from self._open.values()

    def _session(self, record: Json, call: Call) -> str:
        """The attempt that a call belongs to: by a key of the line, or because it goes on from a reply of it."""
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


def call_of(request: Json, response: Json) -> Call:
    """One call of OpenAI's chat protocol. Raises ValueError: it failed, or is of another form."""
    messages = as_list(request.get("messages"), "messages")
    choices = as_list(response.get("choices"), "choices")
    if not messages:
        raise ValueError("a request without messages")
    if not choices or not isinstance(choices[0], dict):
        error = response.get("error")
        raise ValueError(f"a call that failed: {json.dumps(error)[:200]}" if error else "a response without choices")
    choice: Json = choices[0]
    return Call(
        messages=[plain_message(each) for each in messages],
        message=plain_message(choice.get("message")),
        tools=as_list(request.get("tools"), "tools"),
        tokens=_tokens(response, choice),
        sampling=sampling_of(request),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


def _tokens(response: Json, choice: Json) -> Tokens | None:
    """The tokens of a reply of vLLM with `return_token_ids` and `logprobs`; None where it lacks one of them."""
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(prompt, list) or not isinstance(sampled, list) or not isinstance(content, list):
        return None
    return Tokens(prompt, sampled, [each.get("logprob") if isinstance(each, dict) else None for each in content])


def _conversation(record: Json, group: str | None) -> Attempt:
    """A line of `messages`. Raises ValueError: there is no assistant's among them."""
    messages = [plain_message(each) for each in as_list(record.get("messages"), "messages")]
    attempt = _about(record, group)
    tools = as_list(record.get("tools"), "tools")
    for branch in [*as_list(record.get("branches"), "branches"), messages]:
        sent = [plain_message(each) for each in as_list(branch, "branches")]
        if not any(each["role"] == "assistant" for each in sent):
            raise ValueError("no assistant message")
        attempt.add(Call(sent[:-1], sent[-1], tools))
    return attempt


def _about(record: Json, group: str | None) -> Attempt:
    named = (record[key] for key in GROUPS if isinstance(record.get(key), str | int))
    scenario = group or next(named, None)
    task = record.get("scenario") if isinstance(record.get("scenario"), dict) else {}
    if scenario is None and isinstance(id := (task or {}).get("id"), str | int):
        scenario = id
    error = record.get("error")
    return Attempt(
        id=str(record["id"]) if isinstance(record.get("id"), str | int) else None,
        scenario=None if scenario is None else str(scenario),
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
    return record if "messages" in record and _response(record) is not None else None


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
    """A trajectory as one line of `messages`; its tokens are left out, because the form has no place for them."""
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
