"""trl_judge: uses reward functions written for TRL's GRPOTrainer as a judge. TRL is not required.

    judge = trl_judge(accuracy, brevity, weights=[1.0, 0.2])      # in rewards.py; judge: {entry: "rewards.py:judge"}

Each function is called once per group with the arguments of TRL's trainer, except `trainer_state`, `log_extra` and
`log_metric`.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from art_cli.judges import Verdict
from art_cli.runs.trajectory import Json, Score, Trajectory, prompt, sequence
from art_cli.runtime.errors import JudgeError, UsageError
from art_cli.runtime.threads import call_in_thread


def trl_judge(
    *functions: Callable[..., Any], weights: Sequence[float] | None = None
) -> Callable[[list[Trajectory]], Coroutine[Any, Any, Mapping[str, Verdict]]]:
    """Returns a judge that computes the weighted sum of the functions' rewards. A None reward is skipped.

    All weights default to 1. Raises UsageError unless there is exactly one weight per function.
    """
    names = [getattr(function, "__name__", "reward") for function in functions]
    factors = [1.0] * len(functions) if weights is None else weights
    if not functions or len(factors) != len(functions):
        raise UsageError(f"trl_judge: {len(factors)} weights for {len(functions)} reward functions")

    async def judge(group: list[Trajectory]) -> Mapping[str, Verdict]:
        arguments, verdicts = _arguments(group), {}
        rewards = await asyncio.gather(*(_ask(function, arguments) for function in functions))  # [functions][G]
        for trajectory, row in zip(group, zip(*rewards, strict=True), strict=True):
            found = [index for index, reward in enumerate(row) if reward is not None]
            if not found:
                raise JudgeError(f"{trajectory.id}: every reward function returned None")
            total = sum(factors[index] * float(row[index]) for index in found)
            scores = [Score(judge=names[index], score=float(row[index])) for index in found]
            verdicts[trajectory.id] = Verdict(reward=total, scores=scores)
        return verdicts

    return judge


async def _ask(function: Callable[..., Any], arguments: Json) -> list[Any]:
    """Returns the function's rewards. Raises JudgeError if their number is wrong."""
    answer = await call_in_thread(partial(function, **arguments))
    rewards = list(await answer if inspect.isawaitable(answer) else answer)
    if len(rewards) != (count := len(arguments["completions"])):
        raise JudgeError(f"{getattr(function, '__name__', function)}: {len(rewards)} rewards for {count} attempts")
    return rewards


def _arguments(group: Sequence[Trajectory]) -> Json:
    columns = {key: [each.scenario.get(key) for each in group] for key in group[0].scenario if key != "prompt"}
    prompts, completions = zip(*map(_split, group), strict=True)
    ids = [_completion_ids(each) for each in group]
    return columns | {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}


def _split(trajectory: Trajectory) -> tuple[Any, Any]:
    """Returns (prompt, completion) as message lists, or as texts if the scenario's `prompt` is a text.

    The completion starts at the first assistant message after the scenario's `prompt`.
    """
    messages, given = list(trajectory.messages), trajectory.scenario.get("prompt")
    for i, each in enumerate(messages):
        if thoughts := each.get("reasoning_content"):  # TRL keeps thoughts in the content
            messages[i] = each | {"content": f"<think>\n{thoughts}\n</think>\n\n{each.get('content') or ''}"}
    start = len(given) if isinstance(given, list) else 0
    while start < len(messages) and messages[start].get("role") != "assistant":
        start += 1
    if isinstance(given, str):
        return given, (messages[start:] or [{}])[-1].get("content") or ""
    return messages[:start], messages[start:]


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """Returns all tokens after the first prompt, including tool results; [] without recorded tokens."""
    turns = trajectory.turns
    last = first = max((index for index, turn in enumerate(turns) if not turn.is_abandoned), default=-1)
    while turns and (parent := turns[first].parent) is not None and turns[first].kept > len(prompt(turns, parent)):
        first = parent
    return sequence(turns, last)[len(prompt(turns, first)) :] if last >= 0 else []
