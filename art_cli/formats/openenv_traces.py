"""OpenEnv's `TrainingTrace` (openenv 0.10, openenv.core.harness.training): tokens, logprobs and masks of each call.

    {"schema_version": 1, "turns": [{"node_id", "prompt_token_ids", "completion_token_ids", "per_token_logps",
     "loss_mask", "request", "response", "metadata"}]}

Traces have no reward or task, because OpenEnv stores them in sessions. Both are read from an enclosing record
({"trace": {...}, "reward": 1.0, "task_id": "easy-17"}) or from `metadata.art`, written by `record_of`.
"""

from typing import Any

import msgspec

from art_cli.formats.imported_attempt import (
    Tokens,
    TracedAttempt,
    TracedCall,
    TraceReader,
    as_list,
    as_object,
    named,
    numbers,
    reward_in,
    sampling_of,
)
from art_cli.runs.trajectory import Json, Trajectory, Turn, prompt

INNER = ("trace", "training_trace")
GROUPS = ("group_id", "scenario_id", "task_id", "task", "prompt_id")
IDS = ("id", "session_id", "episode_id")
OWN = "art"  # metadata key for data without a TrainingTrace field


class OpenEnvTrace(TraceReader):
    name = "openenv"
    about = "OpenEnv's TrainingTrace, alone or as `trace` of a record with its reward"

    @staticmethod
    def recognises(record: Json) -> bool:
        turns = _trace(record).get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        return isinstance(first, dict) and "completion_token_ids" in first

    def read(self, record: Json, group: str | None = None) -> TracedAttempt:
        trace = _trace(record)
        if trace.get("schema_version", 1) != 1:
            raise ValueError(f"schema_version {trace['schema_version']!r}; only version 1 is supported")
        turns = [as_object(turn, "turns") for turn in as_list(trace.get("turns"), "turns")]
        if turns and (own := as_object(turns[0].get("metadata"), "metadata").get(OWN)):
            whole = _own(own, turns)
            whole.group_id = group or whole.group_id
            return TracedAttempt(whole=whole)
        around = {} if trace is record else record
        attempt = TracedAttempt(
            id=named(around, IDS),
            scenario=group or named(around, GROUPS),
            reward=reward_in(around),
            metrics=numbers(as_object(around.get("metrics"), "metrics")),
        )
        for turn in turns:
            attempt.add(_call(turn))
        return attempt


def _trace(record: Json) -> Json:
    return next((record[key] for key in INNER if isinstance(record.get(key), dict)), record)


def _call(turn: Json) -> TracedCall:
    prompt_ids, sampled = (as_list(turn.get(f"{name}_token_ids"), name) for name in ("prompt", "completion"))
    mask = as_list(turn.get("loss_mask"), "loss_mask")
    if len(mask) != len(prompt_ids) + len(sampled):
        raise ValueError(f"loss_mask has {len(mask)} places, and there are {len(prompt_ids) + len(sampled)} tokens")
    request, response = (as_object(turn.get(name), name) for name in ("request", "response"))
    metadata = as_object(turn.get("metadata"), "metadata")
    choices = as_list(response.get("choices"), "choices")
    choice = as_object(choices[0] if choices else None, "choices")
    return TracedCall(
        messages=request.get("messages"),
        message=choice.get("message"),
        tools=as_list(request.get("tools"), "tools"),
        tokens=Tokens(
            prompt_ids, sampled, as_list(turn.get("per_token_logps"), "per_token_logps"), mask[len(prompt_ids) :]
        ),
        sampling=sampling_of(metadata.get("sampling_params"), request),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


# --- ours -------------------------------------------------------------------------------------------------------------


def record_of(trajectory: Trajectory) -> Json:
    """Returns a trajectory as a TrainingTrace. Raises ValueError without tokens or with invalid logprobs.

    `metadata.art` stores the trajectory without tokens (in the first call) and the remaining fields of each turn.
    Replies never seen by the agent get an all-zero mask.
    """
    if not trajectory.turns:
        raise ValueError("no token ids")
    turns = [_record_of_turn(trajectory, index) for index in range(len(trajectory.turns))]
    fields: Json = msgspec.to_builtins(trajectory)
    kept = {name: fields[name] for name in Trajectory.__struct_fields__ if name in fields and name != "turns"}
    turns[0]["metadata"][OWN]["trajectory"] = kept
    return {"schema_version": 1, "turns": turns}


def _record_of_turn(trajectory: Trajectory, index: int) -> Json:
    turn = trajectory.turns[index]
    prompt_ids, num_sampled = prompt(trajectory.turns, index), len(turn.sampled_ids)
    if not prompt_ids:
        raise ValueError("a call with an empty prompt")
    fields: Json = msgspec.to_builtins(turn)
    own = {name: value for name, value in fields.items() if name not in ("prompt_ids", "sampled_ids", "logprobs")}
    messages, reply = _conversation_at(trajectory, index)
    return {
        "node_id": f"{trajectory.id}/{index}",
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": turn.sampled_ids,
        "per_token_logps": [min(0.0, each) for each in turn.logprobs],
        "loss_mask": [0] * len(prompt_ids) + [0 if turn.is_abandoned else 1] * num_sampled,
        "request": {} if messages is None else {"messages": messages, "tools": trajectory.tools},
        "response": {} if reply is None else {"choices": [{"message": reply, "finish_reason": turn.finish_reason}]},
        "metadata": {
            "index": index,
            "sampling_params": {"temperature": turn.temperature, "top_p": turn.top_p, "top_k": turn.top_k},
            OWN: {"turn": own},
        },
    }


def _conversation_at(trajectory: Trajectory, index: int) -> tuple[list[Json] | None, Json | None]:
    """Returns a call's (messages, reply) for conversations without branches, where reply N belongs to call N."""
    replies = [number for number, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    if trajectory.branches or len(replies) != len(trajectory.turns):
        return None, None
    return trajectory.messages[: replies[index]], trajectory.messages[replies[index]]


def _own(own: Any, turns: list[Json]) -> Trajectory:
    """Returns the trajectory written by `record_of`. Raises ValueError for inconsistent data."""
    fields = as_object(as_object(own, "metadata.art").get("trajectory"), "metadata.art.trajectory")
    made: list[Turn] = []
    for turn in turns:
        kept = as_object(as_object(as_object(turn.get("metadata"), "metadata").get(OWN), OWN).get("turn"), "turn")
        ids = {"prompt_ids": turn.get("prompt_token_ids"), "sampled_ids": turn.get("completion_token_ids")}
        found = msgspec.convert(kept | ids | {"logprobs": turn.get("per_token_logps")}, Turn)
        if len(found.logprobs) != len(found.sampled_ids):
            raise ValueError(f"{len(found.sampled_ids)} sampled tokens and {len(found.logprobs)} logprobs")
        if found.parent is not None and not 0 <= found.parent < len(made):
            raise ValueError(f"a call continues call {found.parent}, which is not an earlier call")
        parent = None if found.parent is None else turns[found.parent]
        start = [] if parent is None else [*parent["prompt_token_ids"], *parent["completion_token_ids"]]
        if not 0 <= found.kept <= len(start) or found.prompt_ids[: found.kept] != start[: found.kept]:
            raise ValueError("a prompt does not continue its parent call")
        made.append(msgspec.structs.replace(found, prompt_ids=found.prompt_ids[found.kept :]))
    return msgspec.convert(fields | {"turns": made}, Trajectory)
