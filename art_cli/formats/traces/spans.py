"""Model calls and spans of a rollout, in OpenTelemetry's conventions for generative AI: one trace for each attempt.

    invoke_agent RUN                 the rollout: scenario, reward, scores, error, limit
      chat MODEL                     a model call: messages, tool calls, tokens, sampling
      execute_tool NAME              a tool call: arguments, result
      judge NAME                     a score: votes, explanation, tokens, cost

Names and shapes are those of https://github.com/open-telemetry/semantic-conventions-genai (gen_ai.*), which Langfuse,
Phoenix, MLflow and Weave read; what they have no word for is `art.*`. Ids are hashes of the run's and the attempt's
ids, so that the same attempt sent twice is one trace. No token ids are in a span.

A ModelCall has the messages around a call, the tools that it called and the turn with its tokens. A trajectory keeps
conversations and turns apart. A reply belongs to a turn where their numbers leave no doubt: in one conversation the
last replies are those of the turns, in order. With several conversations each must have a path of turns of that length.
Where there is a doubt, the call has no turn, rather than another call's tokens. A trajectory has one time and one
duration. The calls share it by their sampled tokens, so that their order is right and their lengths are an estimate.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.replies import thoughts_of
from art_cli.chat.requests import text_of
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory, Turn
from art_cli.runtime.processes.plain_json import is_deep


class ToolUse(NamedTuple):
    """One tool call of a reply. Example: ToolUse("call_1", "search", '{"query": "x"}', "2 mails")"""

    id: str
    name: str
    arguments: str  # the model wrote them, so they need not be JSON
    result: str | None  # if the conversation has an answer to it


class ModelCall(NamedTuple):
    """The reply at `place` of a conversation."""

    conversation: Sequence[Json]
    place: int
    turn: Turn | None  # the turn with its tokens, or None if it is not known
    number: int | None  # index of the turn in the trajectory
    begin: float  # seconds since the epoch, estimated
    end: float

    @property
    def reply(self) -> Json:
        return self.conversation[self.place]

    @property
    def num_prompt(self) -> int | None:
        """Tokens of the whole prompt, or None if that is unknown."""
        return None if self.turn is None else self.turn.kept + len(self.turn.prompt_ids)

    @property
    def tools(self) -> list[ToolUse]:
        results: dict[str, str] = {}
        for message in _until_reply(self.conversation, self.place + 1):
            if message.get("role") == "tool":
                results.setdefault(str(message.get("tool_call_id")), text_of(message.get("content")))
        return [tool._replace(result=results.get(tool.id)) for tool in tool_uses(self.reply)]


def tool_uses(message: Json) -> list[ToolUse]:
    """Returns the tool calls of a message, without their results."""
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
    """Returns every model call, in the order of time as far as it is known; empty without messages."""
    conversations = [*trajectory.branches, trajectory.messages]
    replies = [_replies(conversation) for conversation in conversations]
    found: list[tuple[int, int, int | None]] = []  # (conversation, place, index of the turn)
    seen: set[int] = set()
    for number, turns in enumerate(_turns(trajectory, [len(places) for places in replies])):
        places = replies[number]
        if turns is not None:  # replies before the first turn's are examples in the prompt
            places = places[len(places) - len(turns) :]
        prefixes = _prefixes(conversations[number])
        for position, place in enumerate(places):
            if prefixes[place] not in seen:  # otherwise another conversation begins with the same call
                seen.add(prefixes[place])
                found.append((number, place, None if turns is None else turns[position]))
    if all(index is not None for _, _, index in found):
        found.sort(key=lambda each: each[2] or 0)
    return _timed(trajectory, conversations, found)


def _timed(
    trajectory: Trajectory, conversations: Sequence[Sequence[Json]], found: Sequence[tuple[int, int, int | None]]
) -> list[ModelCall]:
    weights = [1 + (0 if index is None else len(trajectory.turns[index].sampled_ids)) for _, _, index in found]
    share = max(0.0, trajectory.duration_s) / max(1, sum(weights))
    calls, begin = [], trajectory.started_at
    for (number, place, index), weight in zip(found, weights, strict=True):
        turn = None if index is None else trajectory.turns[index]
        calls.append(ModelCall(conversations[number], place, turn, index, begin, begin + share * weight))
        begin = calls[-1].end
    return calls


def _turns(trajectory: Trajectory, num_replies: Sequence[int]) -> list[list[int] | None]:
    """Returns the indexes of the turns of each conversation's last replies, or None if that is not known."""
    seen = [index for index, turn in enumerate(trajectory.turns) if not turn.is_abandoned]
    if len(num_replies) == 1:
        return [seen if seen and len(seen) <= num_replies[0] else None]
    paths = {len(path): path for path in _paths(trajectory.turns, seen)}
    lengths = [num for num in num_replies if num in paths]
    if not len(paths) == len(lengths) == len(set(lengths)) == len(num_replies):
        return [None] * len(num_replies)
    return [paths[num] for num in num_replies]


def _paths(turns: Sequence[Turn], seen: Sequence[int]) -> Iterator[list[int]]:
    """Yields the turns from a first one to each last one that no other turn goes on from."""
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
    """Returns a hash of the conversation up to each message, that message included."""
    hashes, before = [], 0
    for message in conversation:
        before = hash((before, repr(message)))
        hashes.append(before)
    return hashes


def _until_reply(conversation: Sequence[Json], start: int) -> Iterator[Json]:
    for place in range(start, len(conversation)):
        if conversation[place].get("role") == "assistant":
            return
        yield conversation[place]


MAX_TEXT = 16_000  # characters of one message, argument or result; the middle is left out
MAX_INPUT = 64_000  # characters of all messages of one call; the oldest are left out
MAX_DEPTH = 50  # levels of a tool call's arguments; deeper ones stay text
MAX_SPANS = 2_000  # spans of one attempt; the model and tool calls after them are left out

Value = str | bool | int | float | list[str]
PROVIDER = "art"


class TracedRun(NamedTuple):
    """The run that the attempts are of. Example: TracedRun("mine", "3f2a...", "Qwen/Qwen3-0.6B")"""

    name: str
    id: str  # the same for the same run, wherever it is sent from
    model: str


class Event(NamedTuple):
    name: str
    time: float  # seconds since the epoch
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """One span; times are seconds since the epoch."""

    trace_id: bytes  # 16
    id: bytes  # 8
    parent: bytes | None
    name: str
    begin: float
    end: float
    attributes: dict[str, Value]
    events: Sequence[Event] = ()
    error: str | None = None
    is_client: bool = False  # whether it is a call of another service


def spans_of(trajectory: Trajectory, source: TracedRun, *, split: str = "train") -> Iterator[Span]:
    """Yields the rollout's span first, then those inside it, in the order of time."""
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
        self._texts: dict[int, Said] = {}  # messages that are already JSON, by their identity: calls share most of them

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
            "gen_ai.usage.input_tokens": _num_prompt(trajectory),
            "gen_ai.usage.output_tokens": trajectory.num_sampled or _count(trajectory, "num_completion"),
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
    """Returns the final reward of a scored trajectory; without a score, the one that the rollout returned."""
    return trajectory.reward if isinstance(trajectory, ScoredTrajectory) else trajectory.returned_reward


def _evaluation(score: Score) -> dict[str, Value]:
    known: dict[str, Value] = {"gen_ai.evaluation.name": score.judge, "gen_ai.evaluation.score.value": score.score}
    return known | ({"gen_ai.evaluation.explanation": shortened(score.explanation)} if score.explanation else {})


def _num_prompt(trajectory: Trajectory) -> int:
    """Tokens that all calls' prompts have in sum."""
    return sum(turn.kept + len(turn.prompt_ids) for turn in trajectory.turns) or _count(trajectory, "num_prompt")


def _count(trajectory: Trajectory, name: str) -> int:
    return round(trajectory.metrics.get(name, 0.0))


# --- messages ---------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """A message as JSON in the shape of gen_ai.input.messages: a role and parts."""

    text: str
    size: int  # characters of its parts


def said(messages: Sequence[Said]) -> str:
    """Returns the messages as one JSON list. The oldest are left out where all of them have more than MAX_INPUT
    characters."""
    shown: list[str] = []
    left = MAX_INPUT
    for message in reversed(messages):
        left -= message.size
        if left < 0 and shown:
            note = f"[{len(messages) - len(shown)} earlier messages are left out]"
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
    """Returns the record as JSON. msgspec is fifteen times as fast, and does not take lone surrogates and large
    integers."""
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
            parts.append({"type": "text", "content": "[further tool calls are left out]"})
            break
        is_long = len(tool.arguments) > MAX_TEXT
        arguments = shortened(tool.arguments) if is_long else parsed(tool.arguments)
        parts.append({"type": "tool_call", "id": tool.id, "name": tool.name, "arguments": arguments})
    return parts


def parsed(arguments: str) -> Any:
    """Returns a tool call's arguments as JSON, or as the text that they are where they are none, or are deep."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_deep(value, MAX_DEPTH) else value


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Returns the text, with its middle replaced by how much is left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"


def _definitions(tools: Sequence[Json]) -> str:
    functions = [tool.get("function") for tool in tools]
    known = [{"type": "function", **function} for function in functions if isinstance(function, dict)]
    while len(text := json.dumps(known, ensure_ascii=False)) > MAX_INPUT:
        known = known[: len(known) // 2]
    return text
