"""Spans of a rollout in OpenTelemetry's conventions for generative AI: one trace for each attempt.

    invoke_agent RUN                 the rollout: scenario, reward, scores, error, limit
      chat MODEL                     a model call: messages, tool calls, tokens, sampling
      execute_tool NAME              a tool call: arguments, result
      judge NAME                     a score: votes, explanation, tokens, cost

Names and shapes are those of https://github.com/open-telemetry/semantic-conventions-genai (gen_ai.*), which Langfuse,
Phoenix, MLflow and Weave read; what they have no word for is `art.*`. Ids are hashes of the run's and the attempt's
ids, so that the same attempt sent twice is one trace. No token ids are in a span.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.requests import text_of
from art_cli.formats.traces.model_calls import ModelCall, ToolUse, calls_of, tool_uses
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory
from art_cli.runtime.processes.plain_json import is_deep

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
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
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
