"""TracedAttempt: a rollout recorded by another tool, and the conversion to a Trajectory."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.recorder import Recorder
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import MAX_TOKEN_ID, Json, ScoredTrajectory, Trajectory, score_trajectory
from art_cli.runtime.errors import printable

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
MAX_ID = 1000  # maximum characters per id


class Tokens(NamedTuple):
    """The tokens of one call. Example: Tokens([1, 2, 3], [4, 5], [-0.1, -0.7])"""

    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]  # [L]
    logprobs: Sequence[Any]  # [L] in nats; validated on `add`
    mask: Sequence[bool] | None = None  # [L] tokens to train on; None means all


class TracedCall(NamedTuple):
    """One model call: prompt messages and reply."""

    messages: Sequence[Json] | None  # in OpenAI's format, if recorded
    message: Json | None  # the assistant's reply
    tools: Sequence[Json] = ()
    tokens: Tokens | None = None
    sampling: Sampling = Sampling()
    finish_reason: str = "stop"


@dataclass
class TracedAttempt:
    """One rollout. `scenario` is the group id; if None, the first question determines the group."""

    id: str | None = None
    scenario: str | None = None
    is_grouped: bool = False  # `scenario` was given by the caller
    task: Json = field(default_factory=dict)  # additional scenario keys
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    error: str | None = None
    started_at: float = 0.0
    duration_s: float = 0.0
    whole: Trajectory | None = None  # our own trajectory, if the record was exported by art
    _messages: Recorder = field(default_factory=Recorder)  # messages without tokens
    _tokens: Recorder = field(default_factory=Recorder)  # tokens without messages

    def add(self, call: TracedCall) -> None:
        """Adds one call, in chronological order. Raises ValueError for invalid messages or tokens, and adds nothing."""
        asked = None
        if call.messages is not None and call.message is not None:
            sent, message = [plain_message(each) for each in call.messages], plain_message(call.message)
            asked = Request(model="", sampling=call.sampling, messages=sent, tools=[plain_tool(t) for t in call.tools])
        for prompt, sampled, logprobs in _trained(call.tokens) if call.tokens is not None else ():
            choice = Choice(index=0, token_ids=sampled, logprobs=logprobs, finish_reason=call.finish_reason)
            request = Request(model="", sampling=call.sampling, prompt=prompt)
            self._tokens.record(request, Reply(id="", created=0, model="", choices=[choice], prompt_ids=prompt))
        if asked is not None:
            choice = Choice(index=0, message=message)
            self._messages.record(asked, Reply(id="", created=0, model="", choices=[choice], prompt_ids=[]))

    @property
    def length(self) -> int:
        """Total length of all conversations. Shared prefixes count once per branch."""
        return length_of([self._messages.messages, self._messages.branches])

    def trajectory(self) -> ScoredTrajectory:
        """Returns the trajectory with its recorded reward. The group is a placeholder: index 0 of 1."""
        if self.whole is not None:
            return score_trajectory(self.whole, self.whole.returned_reward if self.whole.error is None else None)
        recorder = self._messages
        if not recorder.messages and not self._tokens.turns:
            raise ValueError("no model call with messages or tokens in it")
        if max(len(self.scenario or ""), len(self.id or "")) > MAX_ID:
            raise ValueError(f"an id of more than {MAX_ID} characters")
        scenario = self.scenario or first_question(recorder.messages, [t.prompt_ids for t in self._tokens.turns[:1]])
        trajectory = Trajectory(
            id=self.id or "",
            group_id=scenario,
            group_size=1,
            index=0,
            scenario={**self.task, "id": scenario},
            messages=recorder.messages,
            branches=recorder.branches,
            tools=recorder.tools,
            turns=self._tokens.turns,
            metrics=self.metrics,
            metadata=self.metadata,
            returned_reward=self.reward,
            error=self.error,
            started_at=self.started_at,
            duration_s=self.duration_s,
        )
        return score_trajectory(trajectory, self.reward if self.error is None else None)


class TraceReader:
    """Base class for readers of one format. Records are read in file order."""

    name: str  # value for --from
    about: str  # help text
    joins = False  # whether attempts can span several records

    @staticmethod
    def recognises(record: Json) -> bool:
        """Returns whether the record has this format."""
        raise NotImplementedError

    def read(self, record: Json, group: str | None = None) -> TracedAttempt | None:
        """Returns the record's attempt, or None while records are collected until `finish`.

        `group` overrides the scenario id, which otherwise comes from the record or the first question. Raises
        ValueError for unreadable records.
        """
        raise NotImplementedError

    def finish(self) -> Iterator[TracedAttempt]:
        """Yields attempts assembled from several records."""
        yield from ()


def first_question(messages: Sequence[Json], otherwise: Any = None) -> str:
    """Returns a scenario id for an unlabeled conversation: a hash of the messages preceding any reply."""
    asked = []
    for message in messages:
        if message["role"] == "assistant":
            break
        asked.append([message["role"], message.get("content")])
    text = json.dumps(asked or otherwise, sort_keys=True)
    return f"asked-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}"


def _trained(tokens: Tokens) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Yields (prompt, sampled, logprobs) of each trained run; masked tokens join the next prompt. Raises ValueError."""
    prompt, sampled = list(tokens.prompt_ids), list(tokens.sampled_ids)
    logprobs = list(tokens.logprobs)
    mask = [True] * len(sampled) if tokens.mask is None else [bool(each) for each in tokens.mask]
    if not len(sampled) == len(logprobs) == len(mask):
        raise ValueError(f"{len(sampled)} sampled tokens, {len(logprobs)} logprobs, {len(mask)} places in the mask")
    if not all(type(id) is int and 0 <= id <= MAX_TOKEN_ID for id in (*prompt, *sampled)):
        raise ValueError("token ids are whole numbers from 0")
    if not all(isinstance(each, float | int) and each <= 1e-6 and math.isfinite(each) for each in logprobs):
        raise ValueError("logprobs are finite numbers of at most 0")
    start = 0
    for is_trained, run in groupby(mask):
        end = start + len(list(run))
        if is_trained:
            yield prompt + sampled[:start], sampled[start:end], [min(0.0, float(each)) for each in logprobs[start:end]]
        start = end


# --- values of other tools --------------------------------------------------------------------------------------------


def plain_message(message: Any) -> Json:
    """Returns a message in OpenAI's format. Raises ValueError for an invalid role or content."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise ValueError(f"a message without a valid role: {', '.join(sorted(ROLES))}")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list | None):
        raise ValueError(f"a message whose content is a {type(content).__name__}")
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        raise ValueError("a message whose content list has items that are not objects")
    plain = dict(message)
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in as_list(calls, "tool_calls")]
    return plain


def with_system(messages: list[Any], system: Any) -> list[Any]:
    """Returns the messages after the system prompt that Anthropic's and Bedrock's rows keep next to them, if any.

    Messages that have a system prompt stay as they are.
    """
    has_one = any(isinstance(each, dict) and each.get("role") in ("system", "developer") for each in messages)
    if has_one or not system or not isinstance(system, str | list):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _plain_call(call: Any) -> Json:
    """Returns a tool call in OpenAI's format: {"id", "type", "function": {"name", "arguments": text}}."""
    if not isinstance(call, dict):
        raise ValueError("a tool call that is not an object")
    function = call.get("function")
    if not isinstance(function, dict):  # flat format with name and arguments in the call
        function = {"name": call.get("name", function), "arguments": call.get("arguments")}
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a tool call without a name")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, allow_nan=False)
    return {"id": str(call.get("id") or ""), "type": "function", "function": {**function, "arguments": text}}


def plain_tool(tool: Any) -> Json:
    """Returns a tool in OpenAI's format. Raises ValueError without a name."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return dict(tool)
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError("a tool without a name")
    kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def length_of(value: Any) -> int:
    """Returns the total number of characters in all strings, plus one per element."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(value) if isinstance(value, str) else 1 + sum(map(length_of, parts))


def as_list(value: Any, name: str) -> list[Any]:
    """Returns a list, with null as []. Raises ValueError for other types."""
    if not isinstance(value, list | None):
        raise ValueError(f"{name!r} is a {type(value).__name__}, not a list")
    return value or []


def as_object(value: Any, name: str) -> Json:
    """Returns an object, with null as {}. Raises ValueError for other types."""
    if not isinstance(value, dict | None):
        raise ValueError(f"{name!r} is a {type(value).__name__}, not an object")
    return value or {}


def as_number(value: Any) -> float | None:
    """Returns a valid reward or metric value (booleans become 1 and 0), or None."""
    if not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        return None
    return float(value)


def reward_in(record: Mapping[str, Any]) -> float | None:
    """Returns the record's reward, or None without one. Raises ValueError for any other value."""
    value = record.get("reward")
    if value is not None and as_number(value) is None:
        raise ValueError(f"its reward is {printable(repr(value), limit=40)}, not a number")
    return as_number(value)


def error_in(record: Mapping[str, Any]) -> str | None:
    """Returns the text of the record's error, or None without one. An object's text is its `message`."""
    error = record.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        error = error["message"]
    return None if not error else error if isinstance(error, str) else json.dumps(error)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := as_number(value)) is not None}


def named(record: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Returns the first id (string or integer) found under these keys."""
    return next((str(record[key]) for key in keys if isinstance(record.get(key), str | int)), None)


def seconds(text: Any) -> float:
    """Parses a timestamp to seconds since the epoch; 0 if invalid."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def sampling_of(*sources: Any) -> Sampling:
    """Returns temperature, top_p and top_k from the first source that defines them; default 1, 1 and off."""

    def first(name: str, default: float) -> float:
        found = (as_number(source.get(name)) for source in sources if isinstance(source, dict))
        return next((value for value in found if value is not None), default)

    return Sampling(
        temperature=first("temperature", 1.0), top_p=first("top_p", 1.0), top_k=max(0, int(first("top_k", 0)))
    )
