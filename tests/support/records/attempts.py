"""Attempts as a run records them: a question, a tool call, its result, an answer; scores of a judge."""

from pathlib import Path
from typing import Any

import msgspec

from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory, Turn, score_trajectory

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the mailbox.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "words"}},
            "required": ["query"],
        },
    },
}


def attempt(group: str = "s0000-g0000", index: int = 0, **changed: Any) -> Trajectory:
    """Two turns: 5 prompt and 3 sampled tokens, then 8 + 4 prompt and 2 sampled tokens, within 10 seconds."""
    messages: list[Json] = [
        {"role": "system", "content": "You find mails."},
        {"role": "user", "content": "Who wrote about cheese?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I should look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "cheese"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1 mail of Ann"},
        {"role": "assistant", "content": "It was Ann."},
    ]
    turns = [
        Turn(parent=None, kept=0, prompt_ids=[1] * 5, sampled_ids=[2] * 3, logprobs=[-0.5, -0.25, -0.25],
             raw_logprobs=None, step=7, temperature=0.8, finish_reason="tool_calls"),
        Turn(parent=0, kept=8, prompt_ids=[3] * 4, sampled_ids=[4] * 2, logprobs=[-0.1, -0.1],
             raw_logprobs=None, step=7, temperature=0.8, top_p=0.9),
    ]  # fmt: skip
    made = Trajectory(
        id=f"{group}-{index}", group_id=group, group_size=2, index=index, step=7, scenario={"id": "mail-1"},
        messages=messages, tools=[TOOL], turns=turns, metrics={"found": 1.0, "num_turns": 2.0},
        returned_reward=0.25, started_at=1_700_000_000.0, duration_s=10.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def scored(group: str = "s0000-g0000", index: int = 0, reward: float = 0.75, **changed: Any) -> ScoredTrajectory:
    score = Score(
        judge="ruler", score=reward, model="openai/gpt-6-luna", model_returned="gpt-6-luna-1", votes=[0.5, 1.0],
        explanation="found at once", spread=0.25, cost_usd=0.01, latency_s=1.5,
        prompt_tokens=100.0, completion_tokens=20.0,
    )  # fmt: skip
    return score_trajectory(attempt(group, index, **changed), reward, [score])


def write_attempts(root: Path) -> RunDir:
    """A run that was killed in step 1: step 0 is scored and evaluated, one attempt of step 1 is there."""
    run = RunDir(root)
    config = {"name": "mail", "model": {"base": "builtin:tiny"}, "rollout": {"max_turns": 4}}
    root.mkdir(parents=True)
    run.config_path.write_bytes(msgspec.json.encode(config))
    groups = [[scored("s0000-g0000", index) for index in range(2)]]
    groups.append(
        [
            scored("s0000-g0001", 0, scenario={"id": "mail-2"}, limit="turn_limit"),
            msgspec.structs.replace(
                scored("s0000-g0001", 1, scenario={"id": "mail-2"}, error="timeout: not finished"),
                reward=None,
                scores=[],
            ),
        ]
    )
    _write(run.scored_path(0), [each for group in groups for each in group])
    _write(run.trajectories_path(0), [attempt("s0000-g0000", 0)])
    evaluated = [attempt("e0000-g0000", index, group_size=2) for index in range(2)]
    _write(run.eval_path(0), evaluated)
    _write(run.trajectories_path(1), [attempt("s0001-g0000", 0)])
    return run


def _write(path: Path, records: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
