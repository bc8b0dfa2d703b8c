"""Reader for OpenAI-style logs: `messages` lines, and single calls as request and response.

    {"messages": [...], "tools": [...], "reward": 1.0, "group_id": "easy-17"}     a whole conversation
    {"request": {"messages": [...]}, "response": {"choices": [...]}}              one call of a conversation

Calls to OpenAI's Responses and Anthropic's Messages APIs are also supported. The reply is appended to the request like
a client would send it back, and the `chat` wires convert the result. Calls that continue an earlier reply belong to the
same attempt, even without a session key. `record_of` writes the first form.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Sampling
from art_cli.chat.wires.anthropic_messages import AnthropicCountTokens
from art_cli.chat.wires.responses_items import Item, conversation, messages_of, name_kinds, without_instructions
from art_cli.formats.imported_attempt import (
    Tokens,
    TracedAttempt,
    TracedCall,
    TraceReader,
    as_list,
    as_object,
    error_in,
    named,
    numbers,
    plain_message,
    plain_tool,
    reward_in,
    sampling_of,
    with_system,
)
from art_cli.runs.trajectory import Json, Trajectory

MESSAGES_FIELDS = ("model", "system")  # copied unchanged; messages and tools are converted
MAX_CONTINUED = 2000  # messages before a response that continues others; each response repeats the conversation
Kept = Mapping[str, Sequence[Json]]  # response id -> conversation including the reply
REQUESTS = ("request", "request_body", "body", "input", "kwargs")
RESPONSES = ("response", "response_body", "completion", "output")
SESSIONS = ("session_id", "trace_id", "conversation_id", "thread_id", "run_id")
GROUPS = ("group_id", "scenario_id", "scenario", "task_id", "prompt_id")


def call_of(request: Json, response: Json, kept: Kept) -> TracedCall:
    """Parses a call. `kept` maps response ids to conversations, for Responses requests with `previous_response_id`.

    Raises ValueError for failed calls and unknown formats.
    """
    if error := response.get("error"):
        raise ValueError(f"a call that failed: {json.dumps(error)[:200]}")
    try:
        if isinstance(response.get("choices"), list):
            return _chat_call(request, response)
        if isinstance(response.get("output"), list):
            return _responses_call(request, response, kept)
        if response.get("type") == "message":
            return _messages_call(request, response)
    except (ChatError, msgspec.ValidationError) as error:
        raise ValueError(error.message if isinstance(error, ChatError) else str(error)) from error
    raise ValueError("a response without choices (chat), output (Responses) or content (Messages)")


def _chat_call(request: Json, response: Json) -> TracedCall:
    messages = as_list(request.get("messages"), "messages")
    if not messages:
        raise ValueError("a request without messages")
    if not response["choices"] or not isinstance(choice := response["choices"][0], dict):
        raise ValueError("a response without choices")
    return TracedCall(
        messages=[plain_message(each) for each in messages],
        message=plain_message(choice.get("message")),
        tools=as_list(request.get("tools"), "tools"),
        tokens=_tokens(response, choice),
        sampling=sampling_of(request),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


def _tokens(response: Json, choice: Json) -> Tokens | None:
    """Returns the tokens recorded by vLLM (`return_token_ids` and `logprobs`), if complete."""
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(prompt, list) or not isinstance(sampled, list) or not isinstance(content, list):
        return None
    return Tokens(prompt, sampled, [each.get("logprob") if isinstance(each, dict) else None for each in content])


def _responses_call(request: Json, response: Json, kept: Kept) -> TracedCall:
    asked = request.get("input")
    items = (
        [{"type": "message", "role": "user", "content": asked}] if isinstance(asked, str) else as_list(asked, "input")
    )
    before = request.get("previous_response_id")
    if before is not None and before not in kept:
        raise ValueError(f"it continues a response that is not in the log: {str(before)[:80]!r}")
    whole = json.loads(json.dumps([*items, *response["output"]]))  # deep copy, modified below
    name_kinds(whole)
    said = messages_of(msgspec.convert(whole, list[Item]))
    if not said or said[-1]["role"] != "assistant":
        raise ValueError("a response without a message or a call")
    earlier = [] if before is None else kept[before]
    if len(earlier) > MAX_CONTINUED:
        raise ValueError(f"it continues a conversation of more than {MAX_CONTINUED} messages")
    instructions = request.get("instructions")
    if not isinstance(instructions, str | None):
        raise ValueError("'instructions' is not a string")
    messages = conversation(instructions, [*earlier, *said])
    return TracedCall(
        messages=messages[:-1],
        message=messages[-1],
        tools=[plain_tool(each) for each in _tools(request, "function")],
        sampling=sampling_of(request),
    )


def _tools(request: Json, kind: str) -> list[Json]:
    """Returns the tools of one type, which the client runs; other types run at the provider."""
    tools = as_list(request.get("tools"), "tools")
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("type", kind) == kind]


def _messages_call(request: Json, response: Json) -> TracedCall:
    reply = {"role": "assistant", "content": response.get("content")}
    body = {key: request[key] for key in MESSAGES_FIELDS if request.get(key) is not None}
    body["tools"] = _tools(request, "custom")
    body["messages"] = [*as_list(request.get("messages"), "messages"), reply]
    body.setdefault("model", "unknown")
    # AnthropicCountTokens accepts a final assistant message.
    parsed = AnthropicCountTokens().parse(msgspec.json.encode(body), Sampling())
    messages = parsed.messages or []
    return TracedCall(
        messages=messages[:-1],
        message=messages[-1],
        tools=parsed.tools,
        sampling=sampling_of(request),
        finish_reason="length" if response.get("stop_reason") == "max_tokens" else "stop",
    )


class OpenAILog(TraceReader):
    name = "openai"
    about = "lines with `messages`, or with a request and its response"
    joins = True

    def __init__(self) -> None:
        self._open: dict[str, TracedAttempt] = {}  # session or call number -> attempt
        self._ends: dict[bytes, deque[str]] = defaultdict(deque)  # conversation hash -> attempts ending there
        self._kept: dict[str, list[Json]] = {}  # response id -> conversation
        self._texts: dict[int, tuple[Json, bytes]] = {}  # id() -> kept message and its hashed text

    @staticmethod
    def recognises(record: Json) -> bool:
        if isinstance(record.get("messages"), list):
            return True
        return _request(record) is not None and _response(record) is not None

    def read(self, record: Json, group: str | None = None) -> TracedAttempt | None:
        if "group_size" in record and "turns" in record:
            raise ValueError("an art trajectory; pass it directly to art judge, art step or art sft")
        request, response = _request(record), _response(record)
        if response is None or request is None:
            return _conversation(record, group)
        call = call_of(request, response, self._kept)
        conversation = [*(call.messages or ()), call.message or {}]
        if isinstance(response.get("output"), list) and isinstance(id := response.get("id"), str):
            self._keep(id, without_instructions(request.get("instructions"), conversation))
        digests = _digests(conversation, self._texts)
        name = self._session(record, digests)
        about = _about(record, group)
        attempt = self._open.get(name, about)
        attempt.add(call)
        attempt.metrics |= about.metrics
        attempt.error = about.error or attempt.error
        attempt.is_grouped |= about.is_grouped
        if about.is_grouped:
            attempt.scenario = about.scenario
        self._open[name] = attempt
        self._ends[digests[-1]].append(name)
        attempt.reward = attempt.reward if about.reward is None else about.reward
        return None

    def finish(self) -> Iterator[TracedAttempt]:
        yield from self._open.values()

    def _keep(self, response: str, conversation: list[Json]) -> None:
        self._kept[response] = conversation
        for message in conversation:
            if id(message) not in self._texts:
                self._texts[id(message)] = message, _text(message)

    def _session(self, record: Json, digests: Sequence[bytes]) -> str:
        """Returns the attempt key for a call: a session key in the line, or the attempt whose reply it continues."""
        metadata = record.get("metadata")
        for source in [record, *([metadata] if isinstance(metadata, dict) else [])]:
            for key in SESSIONS:
                if isinstance(source.get(key), str | int):
                    return f"{key} {source[key]}"
        for digest in reversed(digests[:-2]):  # of the prompt without its last message
            if names := self._ends.get(digest):
                return names.popleft()
        return f"call {len(self._open)}"


def _conversation(record: Json, group: str | None) -> TracedAttempt:
    """Parses a `messages` line. Raises ValueError without assistant messages."""
    messages = with_system(as_list(record.get("messages"), "messages"), record.get("system"))
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
    return TracedAttempt(
        id=named(record, ("id",)),
        scenario=named(task or {}, ("id",)) if scenario is None else scenario,
        is_grouped=group is not None,
        task=dict(task or {}),
        reward=reward_in(record),
        metrics=numbers(as_object(record.get("metrics"), "metrics")),
        metadata=as_object(record.get("metadata"), "metadata"),
        error=error_in(record),
    )


def _request(record: Json) -> Json | None:
    if (found := _body(record, REQUESTS)) is not None:
        return found
    return record if ("messages" in record or "input" in record) and _response(record) is not None else None


def _response(record: Json) -> Json | None:
    return _body(record, RESPONSES)


def _body(record: Json, keys: Sequence[str]) -> Json | None:
    """Returns the object under the first of these keys, or the `body` inside this object."""
    found = next((record[key] for key in keys if isinstance(record.get(key), dict)), None)
    return found["body"] if found is not None and isinstance(found.get("body"), dict) else found


def _digests(messages: Sequence[Json], known: Mapping[int, tuple[Json, bytes]]) -> list[bytes]:
    """Returns a hash of each conversation prefix. `known` has the texts of earlier messages."""
    digests, before = [], b""
    for m in messages:
        text = known[id(m)][1] if id(m) in known else _text(m)
        before = hashlib.sha256(before + text).digest()
        digests.append(before)
    return digests


def _text(message: Json) -> bytes:
    """Returns the fields that clients send back, as text."""
    content, calls = message.get("content") or "", _names(message.get("tool_calls"))
    kept = [message.get("role"), content, message.get("tool_call_id"), calls]
    return json.dumps(kept, sort_keys=True).encode("utf-8", "replace")


def _names(calls: Any) -> list[Any]:
    """Returns names and parsed arguments of tool calls; clients may reformat the argument JSON."""
    found = []
    for call in calls or []:
        function = call["function"]
        try:
            found.append([function["name"], json.loads(function["arguments"])])
        except (ValueError, RecursionError):
            found.append([function["name"], function["arguments"]])
    return found


def record_of(trajectory: Trajectory) -> Json:
    """Returns a trajectory as a `messages` line. Tokens are dropped, because the format has no field for them."""
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
