"""Model calls and spans of a rollout, following OpenTelemetry's generative AI conventions: one trace per attempt.

    invoke_agent RUN                 the rollout: scenario, reward, scores, error, limit
      chat MODEL                     a model call: messages, tool calls, tokens, sampling
      execute_tool NAME              a tool call: arguments, result
      judge NAME                     a score: votes, explanation, tokens, cost

Names and structure follow https://github.com/open-telemetry/semantic-conventions-genai (gen_ai.*), supported by
Langfuse, Phoenix, MLflow and Weave. Attributes without a convention are named `art.*`. Ids are hashes of run id and
attempt id, so resending an attempt updates the same trace. Spans contain no token ids.

Replies are matched to turns only if the match is unambiguous: the last replies of a single conversation in order; of
several, each by a turn path of its length. Calls without measured times share the attempt's duration by sampled tokens.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.replies import thoughts_of
from art_cli.chat.requests import text_of
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory, Turn
from art_cli.runtime.processes.plain_json import is_deep

MAX_TEXT = 16_000  # characters per message, argument or result; the middle is cut
MAX_INPUT = 64_000  # characters per call; the oldest messages are dropped
MAX_DEPTH = 50  # nesting levels of tool call arguments; deeper arguments stay text
MAX_SPANS = 2_000  # spans per attempt; later model and tool calls are dropped
Value = str | bool | int | float | list[str]
PROVIDER = "art"


class ToolUse(NamedTuple):
    """A tool call in a reply. Example: ToolUse("call_1", "search", '{"query": "x"}', "2 mails")"""

    id: str
    name: str
    arguments: str  # written by the model; may be invalid JSON
    result: str | None  # if the conversation contains a result


class ModelCall(NamedTuple):
    """The reply at index `place` in a conversation."""

    conversation: Sequence[Json]
    place: int
    turn: Turn | None  # the matching turn, if unambiguous
    number: int | None  # index of the turn in the trajectory
    begin: float  # seconds since the epoch, measured or estimated
    end: float

    @property
    def reply(self) -> Json:
        return self.conversation[self.place]

    @property
    def num_prompt(self) -> int | None:
        """Tokens in the whole prompt, if known."""
        return None if self.turn is None else self.turn.kept + len(self.turn.prompt_ids)

    @property
    def tools(self) -> list[ToolUse]:
        results: dict[str, str] = {}
        for message in takewhile(lambda each: each.get("role") != "assistant", self.conversation[self.place + 1 :]):
            if message.get("role") == "tool":
                results.setdefault(str(message.get("tool_call_id")), text_of(message.get("content")))
        return [tool._replace(result=results.get(tool.id)) for tool in tool_uses(self.reply)]


def tool_uses(message: Json) -> list[ToolUse]:
    found = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else ""
            found.append(ToolUse(str(call.get("id")), str(function.get("name")), text, None))
    return found


def calls_of(trajectory: Trajectory) -> list[ModelCall]:
    """Returns all model calls, in chronological order if known; empty without messages."""
    conversations = [*trajectory.branches, trajectory.messages]
    replies = [_replies(conversation) for conversation in conversations]
    found: list[tuple[int, int, int | None]] = []  # (conversation, place, turn index)
    seen: set[int] = set()
    for number, turns in enumerate(_turns(trajectory, [len(places) for places in replies])):
        places = replies[number]
        if turns is not None:  # earlier replies are examples in the prompt
            places = places[len(places) - len(turns) :]
        prefixes = _prefixes(conversations[number])
        for position, place in enumerate(places):
            if prefixes[place] not in seen:  # skip calls shared with an earlier conversation
                seen.add(prefixes[place])
                found.append((number, place, None if turns is None else turns[position]))
    if all(index is not None for _, _, index in found):
        found.sort(key=lambda each: each[2] or 0)
    return _timed(trajectory, conversations, found)


def _timed(
    trajectory: Trajectory, conversations: Sequence[Sequence[Json]], found: Sequence[tuple[int, int, int | None]]
) -> list[ModelCall]:
    start, duration = trajectory.started_at, max(0.0, trajectory.duration_s)
    known = [index for _, _, index in found if index is not None and index < len(trajectory.spans)]
    if len(known) == len(found):
        spans = [[min(max(0.0, each), duration) for each in trajectory.spans[index]] for index in known]
    else:
        weights = [1 + (0 if index is None else len(trajectory.turns[index].sampled_ids)) for _, _, index in found]
        ends = [duration * done / max(1, sum(weights)) for done in accumulate(weights, initial=0)]
        spans = [list(each) for each in pairwise(ends)]
    return [
        ModelCall(conversations[number], place, None if index is None else trajectory.turns[index], index,
                  start + begin, start + max(begin, end))
        for (number, place, index), (begin, end) in zip(found, spans, strict=True)
    ]  # fmt: skip


def _turns(trajectory: Trajectory, num_replies: Sequence[int]) -> list[list[int] | None]:
    """Returns the turn indexes of each conversation's last replies, if unambiguous."""
    seen = [index for index, turn in enumerate(trajectory.turns) if not turn.is_abandoned]
    if len(num_replies) == 1:
        return [seen if seen and len(seen) <= num_replies[0] else None]
    paths = {len(path): path for path in _paths(trajectory.turns, seen)}
    lengths = [num for num in num_replies if num in paths]
    if not len(paths) == len(lengths) == len(set(lengths)) == len(num_replies):
        return [None] * len(num_replies)
    return [paths[num] for num in num_replies]


def _paths(turns: Sequence[Turn], seen: Sequence[int]) -> Iterator[list[int]]:
    """Yields all root-to-leaf paths of turns."""
    inner = {turns[index].parent for index in seen}
    for leaf in seen:
        if leaf not in inner:
            path: list[int] = [leaf]
            while (parent := turns[path[-1]].parent) is not None:
                path.append(parent)
            yield path[::-1]


def _replies(conversation: Sequence[Json]) -> list[int]:
    return [place for place, message in enumerate(conversation) if message.get("role") == "assistant"]


def _prefixes(conversation: Sequence[Json]) -> list[int]:
    """Returns a hash of the messages up to each index."""
    return list(accumulate(map(repr, conversation), lambda before, each: hash((before, each)), initial=0))[1:]


class TracedRun(NamedTuple):
    """The attempts' run. Example: TracedRun("mine", "3f2a...", "Qwen/Qwen3-0.6B")"""

    name: str
    id: str  # stable per run
    model: str


class Event(NamedTuple):
    name: str
    time: float  # seconds since the epoch
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """A span; times are seconds since the epoch."""

    trace_id: bytes  # 16
    id: bytes  # 8
    parent: bytes | None
    name: str
    begin: float
    end: float
    attributes: dict[str, Value]
    events: Sequence[Event] = ()
    error: str | None = None
    is_client: bool = False  # call to another service


def spans_of(trajectory: Trajectory, source: TracedRun, *, split: str = "train") -> Iterator[Span]:
    """Yields the rollout span first, then the inner spans in chronological order."""
    maker = _Maker(trajectory, source, split)
    yield maker.rollout()
    num = 1
    for number, call in enumerate(maker.calls):
        if num >= MAX_SPANS:
            break
        yield maker.chat(number, call)
        tools = call.tools[: MAX_SPANS - num]
        yield from (maker.tool(f"{number}.{index}", tool, call.end) for index, tool in enumerate(tools))
        num += 1 + len(tools)
    if isinstance(trajectory, ScoredTrajectory):
        yield from (maker.judge(index, score) for index, score in enumerate(trajectory.scores))


def trace_id_of(trajectory: Trajectory, source: TracedRun, split: str) -> bytes:
    return hashlib.sha256(f"{source.id}\n{split}\n{trajectory.id}".encode("utf-8", "replace")).digest()[:16]


class _Maker:
    def __init__(self, trajectory: Trajectory, source: TracedRun, split: str) -> None:
        self.trajectory, self.source, self.split = trajectory, source, split
        self.trace_id = trace_id_of(trajectory, source, split)
        self.root = self._id("rollout")
        self.calls = calls_of(trajectory)
        self.end = trajectory.started_at + max(0.0, trajectory.duration_s)
        self._texts: dict[int, Said] = {}  # message id -> JSON; calls share most messages

    def _said(self, messages: Sequence[Json]) -> str:
        for message in messages:
            if id(message) not in self._texts:
                self._texts[id(message)] = as_said(message)
        return said([self._texts[id(message)] for message in messages])

    def _id(self, name: str) -> bytes:
        return hashlib.sha256(self.trace_id + name.encode()).digest()[:8]

    def rollout(self) -> Span:
        trajectory = self.trajectory
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.agent.name": self.source.name,
            "gen_ai.conversation.id": trajectory.id,
            "gen_ai.request.model": self.source.model,
            "gen_ai.usage.input_tokens": num_prompt(trajectory),
            "gen_ai.usage.output_tokens": num_completion(trajectory),
            "gen_ai.tool.definitions": _definitions(trajectory.tools) if trajectory.tools else None,
            "gen_ai.input.messages": self._said(trajectory.messages[: self._first_reply()]),
            "gen_ai.output.messages": self._said(trajectory.messages[-1:]),
            "art.run": self.source.name,
            "art.split": self.split,
            "art.step": trajectory.step,
            "art.group_id": trajectory.group_id,
            "art.attempt": trajectory.index,
            "art.scenario_id": str(trajectory.scenario.get("id", trajectory.group_id)),
            "art.limit": trajectory.limit,
            "art.returned_reward": trajectory.returned_reward,
            "art.reward": reward_of(trajectory),
            **{f"art.metric.{name}": value for name, value in trajectory.metrics.items()},
        }
        if len(self.calls) > MAX_SPANS:
            attributes["art.num_calls"] = len(self.calls)
        events = [Event("gen_ai.evaluation.result", self.end, each) for each in self._evaluations()]
        return self._span("rollout", f"invoke_agent {self.source.name}", attributes, events, trajectory.error)

    def _first_reply(self) -> int:
        return self.calls[0].place if self.calls and self.calls[0].conversation is self.trajectory.messages else 2

    def _evaluations(self) -> Iterator[dict[str, Value]]:
        reward = reward_of(self.trajectory)
        if reward is not None:
            yield {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": reward}
        for score in self.trajectory.scores if isinstance(self.trajectory, ScoredTrajectory) else ():
            yield _evaluation(score)

    def chat(self, number: int, call: ModelCall) -> Span:
        turn = call.turn
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self.source.model,
            "gen_ai.response.model": self.source.model,
            "gen_ai.conversation.id": self.trajectory.id,
            "gen_ai.input.messages": self._said(call.conversation[: call.place]),
            "gen_ai.output.messages": said([as_said(call.reply, finish=turn.finish_reason if turn else None)]),
        }
        if turn is not None:
            attributes |= {
                "gen_ai.request.temperature": turn.temperature,
                "gen_ai.request.top_p": turn.top_p,
                "gen_ai.request.top_k": turn.top_k or None,
                "gen_ai.response.finish_reasons": [turn.finish_reason],
                "gen_ai.usage.input_tokens": call.num_prompt,
                "gen_ai.usage.output_tokens": len(turn.sampled_ids),
                "art.policy_step": turn.step,
                "art.turn": call.number,
                "art.logprob": sum(turn.logprobs),
            }
        name = f"chat {self.source.model}"
        return self._span(f"chat {number}", name, attributes, begin=call.begin, end=call.end)._replace(is_client=True)

    def tool(self, key: str, tool: ToolUse, time: float) -> Span:
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": shortened(tool.name),
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": shortened(tool.id),
            "gen_ai.tool.call.arguments": shortened(tool.arguments),
            "gen_ai.tool.call.result": None if tool.result is None else shortened(tool.result),
        }
        return self._span(f"tool {key}", f"execute_tool {tool.name}", attributes, begin=time, end=time)

    def judge(self, number: int, score: Score) -> Span:
        attributes: dict[str, Value | None] = {
            **_evaluation(score),
            "gen_ai.request.model": score.model,
            "gen_ai.response.model": score.model_returned,
            "gen_ai.usage.input_tokens": None if score.prompt_tokens is None else round(score.prompt_tokens),
            "gen_ai.usage.output_tokens": None if score.completion_tokens is None else round(score.completion_tokens),
            "art.votes": json.dumps(score.votes) if score.votes else None,
            "art.spread": score.spread,
            "art.cost_usd": score.cost_usd,
        }
        end = self.end + (score.latency_s or 0.0)
        return self._span(f"judge {number}", f"judge {score.judge}", attributes, begin=self.end, end=end)

    def _span(
        self,
        key: str,
        name: str,
        attributes: Mapping[str, Value | None],
        events: Sequence[Event] = (),
        error: str | None = None,
        *,
        begin: float | None = None,
        end: float | None = None,
    ) -> Span:
        known = {name: value for name, value in attributes.items() if value is not None}
        if error is not None:
            known["error.type"] = error.partition(":")[0][:100]
        return Span(
            trace_id=self.trace_id,
            id=self.root if key == "rollout" else self._id(key),
            parent=None if key == "rollout" else self.root,
            name=name[:200],
            begin=self.trajectory.started_at if begin is None else begin,
            end=self.end if end is None else end,
            attributes=known,
            events=events,
            error=None if error is None else shortened(error),
        )


def reward_of(trajectory: Trajectory) -> float | None:
    """Returns the final reward of a scored trajectory, otherwise the rollout's reward."""
    return trajectory.reward if isinstance(trajectory, ScoredTrajectory) else trajectory.returned_reward


def _evaluation(score: Score) -> dict[str, Value]:
    known: dict[str, Value] = {"gen_ai.evaluation.name": score.judge, "gen_ai.evaluation.score.value": score.score}
    return known | ({"gen_ai.evaluation.explanation": shortened(score.explanation)} if score.explanation else {})


def num_prompt(trajectory: Trajectory) -> int:
    """Returns the total number of prompt tokens over all calls."""
    counted = sum(turn.kept + len(turn.prompt_ids) for turn in trajectory.turns)
    return counted or round(trajectory.metrics.get("num_prompt", 0.0))


def num_completion(trajectory: Trajectory) -> int:
    return trajectory.num_sampled or round(trajectory.metrics.get("num_completion", 0.0))


# --- messages ---------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """A message as JSON, in the format of gen_ai.input.messages: role and parts."""

    text: str
    size: int  # characters in all parts


def said(messages: Sequence[Said]) -> str:
    """Returns the messages as a JSON list. Drops the oldest messages beyond MAX_INPUT characters."""
    shown: list[str] = []
    left = MAX_INPUT
    for message in reversed(messages):
        left -= message.size
        if left < 0 and shown:
            note = f"[{len(messages) - len(shown)} earlier messages omitted]"
            shown.append(as_said({"role": "system", "content": note}).text)
            break
        shown.append(message.text)
    return f"[{','.join(shown[::-1])}]"


def as_said(message: Json, *, finish: str | None = None) -> Said:
    parts = _parts(message)
    record: Json = {"role": str(message.get("role")), "parts": parts}
    if finish is not None:
        record["finish_reason"] = finish
    return Said(_json(record), sum(len(str(value)) for part in parts for value in part.values()))


def _json(record: Json) -> str:
    """Returns JSON. msgspec is fifteen times faster, but rejects lone surrogates and large integers."""
    try:
        return msgspec.json.encode(record).decode()
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(record, ensure_ascii=False)


def _parts(message: Json) -> list[Json]:
    if message.get("role") == "tool":
        response = shortened(text_of(message.get("content")))
        return [{"type": "tool_call_response", "id": str(message.get("tool_call_id")), "response": response}]
    parts: list[Json] = []
    if thoughts := thoughts_of(message):
        parts.append({"type": "reasoning", "content": shortened(str(thoughts))})
    if text := text_of(message.get("content")):
        parts.append({"type": "text", "content": shortened(text)})
    left = MAX_INPUT
    for tool in tool_uses(message):
        left -= min(len(tool.arguments), MAX_TEXT) + len(tool.name) + len(tool.id)
        if left < 0:
            parts.append({"type": "text", "content": "[further tool calls omitted]"})
            break
        is_long = len(tool.arguments) > MAX_TEXT
        arguments = shortened(tool.arguments) if is_long else parsed(tool.arguments)
        parts.append({"type": "tool_call", "id": tool.id, "name": tool.name, "arguments": arguments})
    return parts


def parsed(arguments: str) -> Any:
    """Parses a tool call's arguments; returns the text for invalid or deeply nested JSON."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_deep(value, MAX_DEPTH) else value


def shortened(text: str) -> str:
    """Cuts the middle out of texts longer than MAX_TEXT and inserts the number of omitted characters."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters omitted]\n{text[-half:]}"


def _definitions(tools: Sequence[Json]) -> str:
    functions = [tool.get("function") for tool in tools]
    known = [{"type": "function", **function} for function in functions if isinstance(function, dict)]
    while len(text := json.dumps(known, ensure_ascii=False)) > MAX_INPUT:
        known = known[: len(known) // 2]
    return text
