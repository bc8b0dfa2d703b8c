"""TRL reward functions: arguments and results are handled like in TRL's trainer."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_cli import trl_judge
from art_cli.config.schema import FunctionJudgeConfig
from art_cli.judges import Verdict, make_judge
from art_cli.runs.trajectory import Json, Score, Trajectory, Turn
from art_cli.runtime.errors import JudgeError, UsageError

Reward = Callable[..., Any]
USER = {"role": "user", "content": "Who reigned in 1500?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "look_up"}}]}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "Henry VII"}


def said(text: str, **more: Any) -> Json:
    return {"role": "assistant", "content": text, **more}


def turn(parent: int | None, kept: int, prompt_ids: list[int], sampled_ids: list[int], **more: Any) -> Turn:
    logprobs = [-1.0] * len(sampled_ids)
    given = {"logprobs": logprobs, "raw_logprobs": None, "step": 0, "temperature": 1.0, **more}
    return Turn(parent=parent, kept=kept, prompt_ids=prompt_ids, sampled_ids=sampled_ids, **given)


def group_of(scenario: Json, *conversations: list[Json], turns: Sequence[Sequence[Turn]] = ()) -> list[Trajectory]:
    return [
        Trajectory(
            id=f"t{index}",
            group_id="g",
            group_size=len(conversations),
            index=index,
            scenario=scenario,
            messages=messages,
            turns=list(turns[index]) if turns else [],
        )
        for index, messages in enumerate(conversations)
    ]


def judged(group: list[Trajectory], *functions: Reward, weights: Sequence[float] | None = None) -> Any:
    return asyncio.run(trl_judge(*functions, weights=weights)(group))


def given_to_a_function(group: list[Trajectory]) -> Json:
    seen: Json = {}

    def record(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0] * len(arguments["completions"])

    judged(group, record)
    return seen


# --- what a function is given -----------------------------------------------------------------------------------------


def test_a_completion_is_what_follows_the_prompt_with_tool_calls_and_results() -> None:
    scenario = {"id": "s", "prompt": [USER], "solution": "Henry VII"}
    group = group_of(scenario, [USER, CALL, TOOL, said("Henry VII")], [USER, said("Nobody")])
    assert given_to_a_function(group) == {
        "prompts": [[USER], [USER]],
        "completions": [[CALL, TOOL, said("Henry VII")], [said("Nobody")]],
        "completion_ids": [[], []],
        "id": ["s", "s"],
        "solution": ["Henry VII", "Henry VII"],
    }


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]], ids=["as it is", "with system"])
def test_replies_in_the_prompt_are_no_part_of_the_completion(before: list[Json]) -> None:
    """A prompt with an example, also after a system message that the rollout adds."""
    example = [{"role": "user", "content": "Who reigned in 1600?"}, said("Elizabeth I"), USER]
    group = group_of({"prompt": example}, [*before, *example, said("Henry VII")])
    seen = given_to_a_function(group)
    assert (seen["prompts"], seen["completions"]) == ([[*before, *example]], [[said("Henry VII")]])


def test_a_prompt_that_is_a_text_has_a_completion_that_is_a_text() -> None:
    seen = given_to_a_function(group_of({"prompt": "Who?"}, [USER, said("Henry VII")], [USER, CALL], [USER]))
    assert (seen["prompts"], seen["completions"]) == (["Who?"] * 3, ["Henry VII", "", ""])


def test_the_tokens_are_those_after_the_first_prompt() -> None:
    """A reply; a reply, a tool result (7 8) and a reply; a second call with only part of the first prompt."""
    first = turn(None, 0, [1, 2, 3], [4, 5])
    turns = [
        [first],
        [first, turn(0, 5, [7, 8], [9])],
        [first, turn(0, 2, [6], [9])],
        [first, turn(0, 5, [7, 8], [9], is_abandoned=True)],
    ]
    group = group_of({}, *[[USER, said("x")] for _ in turns], turns=turns)
    assert given_to_a_function(group)["completion_ids"] == [[4, 5], [4, 5, 7, 8, 9], [9], [4, 5]]


# --- what becomes of its answer ---------------------------------------------------------------------------------------

GROUP = group_of({"prompt": [USER]}, [USER, said("yes")], [USER, said("no")])


def constant(name: str, *values: Any) -> Reward:
    def reward(completions: Any, **columns: Any) -> list[Any]:
        return list(values)

    reward.__name__ = name
    return reward


def test_the_reward_is_the_weighted_sum_and_none_adds_nothing() -> None:
    """1 * 0.5 + 2 * 3 = 6.5; 1 * 0.25, because the second function does not score the second attempt."""
    found = judged(GROUP, constant("a", 0.5, 0.25), constant("b", 3, None), weights=[1, 2])
    assert found == {
        "t0": Verdict(reward=6.5, scores=[Score(judge="a", score=0.5), Score(judge="b", score=3.0)]),
        "t1": Verdict(reward=0.25, scores=[Score(judge="a", score=0.25)]),
    }


def test_an_attempt_that_no_function_scores_has_no_reward() -> None:
    with pytest.raises(JudgeError, match="t1: every reward function returned None"):
        judged(GROUP, constant("a", 1, None), constant("b", 1, None))


def test_a_function_with_too_few_rewards_is_named() -> None:
    with pytest.raises(JudgeError, match="short: 1 rewards for 2 attempts"):
        judged(GROUP, constant("short", 1))


@pytest.mark.parametrize(("functions", "weights"), [((), None), ((len,), [1, 2])])
def test_there_is_one_weight_for_each_function(functions: tuple[Reward, ...], weights: list[float] | None) -> None:
    with pytest.raises(UsageError, match=r"trl_judge: \d weights for \d reward functions"):
        trl_judge(*functions, weights=weights)


async def test_a_function_that_demands_the_trainer_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "from art_cli import trl_judge\n"
        "def late(completions, trainer_state, **columns):\n    return [trainer_state.global_step] * len(completions)\n"
        "judge = trl_judge(late)\n"
    )
    judge = make_judge(FunctionJudgeConfig(name="function", entry="rewards.py:judge"), tmp_path)
    try:
        with pytest.raises(JudgeError, match=r"rewards.py:judge: TypeError: late\(\) missing .* 'trainer_state'"):
            await judge.judge(GROUP)
    finally:
        await judge.close()


# --- TRL's own trainer ------------------------------------------------------------------------------------------------


def by_trl(group: list[Trajectory], functions: list[Reward], weights: list[float]) -> list[float]:
    """Rewards computed by TRL's trainer (function calls and weighted sum), without a model."""
    import torch
    from accelerate import Accelerator
    from trl import GRPOTrainer

    arguments = given_to_a_function(group)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        trainer = SimpleNamespace(
            accelerator=Accelerator(cpu=True),
            state=SimpleNamespace(global_step=0),
            args=SimpleNamespace(report_to=[]),
            environments=None,
            reward_funcs=functions,
            reward_processing_classes=[None] * len(functions),
            reward_func_names=[str(index) for index, _ in enumerate(functions)],
            _log_completion_extra=lambda *_: None,
            _log_metric=lambda *_: None,
            async_loop=loop,
        )
        rows = GRPOTrainer._calculate_rewards(
            trainer,
            [each.scenario for each in group],
            arguments["prompts"],
            arguments["completions"],
            arguments["completion_ids"],
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
    found: list[float] = (rows * torch.tensor(weights)).nansum(dim=1).tolist()
    return found


@pytest.mark.slow
def test_trls_own_functions_get_the_rewards_that_trls_trainer_gives() -> None:
    from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

    async def is_right(completions: Any, solution: list[str], **columns: Any) -> list[float | None]:
        return [float(each[-1]["content"].endswith(s)) for each, s in zip(completions, solution, strict=True)]

    def only_long(completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if len(ids) < 3 else 0.5 for ids in completion_ids]

    prompt_ids = [1, 2]
    replies = [
        said("Henry VII", reasoning_content="1500 is Tudor"),
        said("Henry VII"),
        said("<think>a</think>b"),
        said(""),
    ]
    sampled = [[5, 6, 7, 8], [5, 6], [5, 5, 5, 5, 5, 5, 5], [9]]
    group = group_of(
        {"prompt": [USER], "solution": "Henry VII"},
        *[[USER, reply] for reply in replies],
        turns=[[turn(None, 0, prompt_ids, ids)] for ids in sampled],
    )
    functions = [
        think_format_reward,
        get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4),
        get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        is_right,
        only_long,
    ]
    weights = [1.0, 0.5, 0.25, 2.0, 1.0]
    found: Mapping[str, Verdict] = judged(group, *functions, weights=weights)
    expected = by_trl(group, functions, weights)
    assert [found[each.id].reward for each in group] == pytest.approx(expected, abs=1e-6)
    assert len({round(each, 3) for each in expected}) == 4
