"""Reader for verifiers traces (0.4, `traces.jsonl`): a message graph with the tokens added by each message.

A path from root to leaf is a conversation, and concatenating the tokens along the path gives the model's input. Tokens
of untrained agents (opponents, judges) are dropped. Logprobs in the files are rounded to four decimals (error up to
5e-5).
"""

from collections.abc import Sequence
from typing import Any

from art_cli.formats.imported_attempt import (
    Tokens,
    TracedAttempt,
    TracedCall,
    TraceReader,
    as_list,
    as_number,
    as_object,
    numbers,
    sampling_of,
)
from art_cli.runs.trajectory import Json


class VerifiersTrace(TraceReader):
    name = "verifiers"
    about = "traces.jsonl of verifiers: a graph of messages with tokens"

    @staticmethod
    def recognises(record: Json) -> bool:
        nodes = record.get("nodes")
        return isinstance(nodes, list) and isinstance(record.get("task"), dict) and "rewards" in record

    def read(self, record: Json, group: str | None = None) -> TracedAttempt:
        if (version := record.get("version", 1)) != 1:
            raise ValueError(f"a trace of version {version!r}; only version 1 is supported")
        task = as_object(record.get("task"), "task")
        rewards = {name: _reward(each) for name, each in as_object(record.get("rewards"), "rewards").items()}
        known = {name: value for name, value in rewards.items() if value is not None}
        attempt = TracedAttempt(
            id=str(record["id"]) if isinstance(record.get("id"), str) else None,
            scenario=group or _scenario(task),
            task={"task": as_object(task.get("data"), "task.data")},
            reward=sum(known.values()) if known else None,
            metrics=numbers(as_object(record.get("metrics"), "metrics")) | numbers(known),
            error=_error(record),
        )
        nodes = [as_object(node, "nodes") for node in as_list(record.get("nodes"), "nodes")]
        calls = {call.get("node"): call for call in as_list(record.get("calls"), "calls") if isinstance(call, dict)}
        is_trained = as_object(record.get("agent"), "agent").get("trainable") is not False
        for index, node in enumerate(nodes):
            if node.get("sampled"):
                call = _call(nodes, index, calls.get(index) or {}, record)
                attempt.add(call if is_trained else call._replace(tokens=None))
        return attempt


def _scenario(task: Json) -> str | None:
    found = (task.get("key"), as_object(task.get("data"), "task.data").get("id"), task.get("hash"))
    return next((str(each) for each in found if isinstance(each, str | int)), None)


def _reward(value: Any) -> float | None:
    """Returns a named reward's weighted score, if it was scored."""
    if not isinstance(value, dict):
        return as_number(value)
    score, weight = as_number(value.get("score")), as_number(value.get("weight", 1.0))
    return None if score is None or weight is None else score * weight


def _error(record: Json) -> str | None:
    errors = as_list(record.get("errors"), "errors")
    if record.get("ok") is not False:
        return None
    last = errors[-1] if errors and isinstance(errors[-1], dict) else {}
    return f"{last.get('type', 'verifiers')}: {last.get('message', record.get('stop_condition') or 'it did not end')}"


def _call(nodes: Sequence[Json], index: int, call: Json, record: Json) -> TracedCall:
    """Returns the call that sampled a node. Raises ValueError for an invalid parent or mismatched tokens."""
    path = _path(nodes, index)
    tools = as_list(path[0].get("tools"), "tools") or as_list(record.get("tools"), "tools")
    prompt = [id for node in path[:-1] for id in as_list(node.get("token_ids"), "token_ids")]
    ids, mask = as_list(path[-1].get("token_ids"), "token_ids"), as_list(path[-1].get("mask"), "mask")
    logprobs = iter(as_list(path[-1].get("logprobs"), "logprobs"))
    start = mask.index(True) if True in mask else len(ids)
    spread = [next(logprobs, None) if is_sampled else 0.0 for is_sampled in mask[start:]]
    has_tokens = start < len(ids)
    if has_tokens and (len(mask) != len(ids) or None in spread or next(logprobs, None) is not None):
        raise ValueError(f"node {index}: the numbers of tokens, mask entries and logprobs differ")
    return TracedCall(
        messages=[_message(node) for node in path[:-1]],
        message=_message(path[-1]),
        tools=tools,
        tokens=Tokens(prompt + ids[:start], ids[start:], spread, mask[start:]) if has_tokens else None,
        sampling=sampling_of(call.get("sampling")),
        finish_reason=str(call.get("finish_reason") or "stop"),
    )


def _path(nodes: Sequence[Json], index: int) -> list[Json]:
    path = [nodes[index]]
    while (parent := path[-1].get("parent")) is not None:
        if not isinstance(parent, int) or not 0 <= parent < index:
            raise ValueError(f"node {index}: its parent {parent!r} is not an earlier node")
        path.append(nodes[parent])
        index = parent
    return path[::-1]


def _message(node: Json) -> Json:
    message = as_object(node.get("message"), "message")
    return {key: value for key, value in message.items() if value is not None or key == "content"}
