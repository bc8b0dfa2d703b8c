"""Credit per step: a small group written by hand, its states, and GiGPO worked out on paper."""

import asyncio
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.compose import load_config
from art_cli.config.schema import GrpoConfig, LossConfig
from art_cli.learners.algorithms.gigpo import GigpoConfig
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.algorithms.step_credit import (
    count_shared,
    episodes_of,
    states_of,
    step_advantages,
)
from art_cli.learners.samples import Credit, token_weights
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Turn, prompt
from tests.support.paths import LETTERS
from tests.support.records.trees import scored, turn, turn_trees


def played(states: str, reward: float, *, index: int = 0) -> ScoredTrajectory:
    """A conversation of one turn per letter: turn t answers one more prompt token in the state of that name."""
    turns: list[Turn] = []
    for number, state in enumerate(states):
        before = {"parent": number - 1, "kept": 2 * number} if number else {}
        turns.append(turn([number], [50 + index], state=state, **before))  # type: ignore[arg-type]
    return scored(turns, reward, index=index)


# Three attempts at one scenario. B is in two of them, and twice in the first.
SCALED = GrpoConfig(scale_advantages=True)
GROUP = [played("ABB", 1.0, index=0), played("AC", 0.0, index=1), played("AB", 0.0, index=2)]


def values(worth: Sequence[Credit | float | None], group: Sequence[ScoredTrajectory]) -> list[list[float]]:
    """[G][turns] the weight of each turn's sampled tokens, which is the same for all of a turn's."""
    found = []
    for trajectory, credit in zip(group, worth, strict=True):
        assert isinstance(credit, Credit) and credit.policy is not None and not isinstance(credit.policy, float)
        token_weights(trajectory, credit)  # raises where a token of a prompt has a weight
        found.append([float(row[-1]) for row in credit.policy])
    return found


def worth_of(loss: LossConfig, group: Sequence[ScoredTrajectory]) -> list[list[float]]:
    return values(build_algorithm(loss, max_tokens=10).credit(group), group)


# --- gigpo ------------------------------------------------------------------------------------------------------------


def test_a_reply_is_compared_with_those_in_the_same_state() -> None:
    """gamma 1/2. Returns of attempt 0: 1/4, 1/2, 1; of the others: 0.

    A: 1/4, 0, 0, mean 1/12. B: 1/2, 1, 0, mean 1/2. C is there once: 0.
    """
    steps = step_advantages(episodes_of(GROUP, gamma=0.5), scale=False)
    assert steps[0] == pytest.approx([1 / 6, 0.0, 0.5])
    assert steps[1] == pytest.approx([-1 / 12, 0.0])
    assert steps[2] == pytest.approx([-1 / 12, -0.5])


def test_gigpo_adds_the_weighted_step_to_the_attempts_own_advantage() -> None:
    """Rewards 1, 0, 0: 2/3, -1/3, -1/3. Half of the steps' advantages above are added."""
    loss = GigpoConfig(name="gigpo", gamma=0.5, step_weight=0.5, scale_advantages=False)
    first, second, third = worth_of(loss, GROUP)
    assert first == pytest.approx([2 / 3 + 1 / 12, 2 / 3, 2 / 3 + 1 / 4])
    assert second == pytest.approx([-1 / 3 - 1 / 24, -1 / 3])
    assert third == pytest.approx([-1 / 3 - 1 / 24, -1 / 3 - 1 / 4])


def test_gigpo_divides_both_parts_by_their_own_deviation() -> None:
    """In B: 0, 1/2, -1/2 over sqrt((1/4 + 1/4) / 2) = 1/2. The attempts: 2/3, -1/3, -1/3 over sqrt(1/3)."""
    [_, second, third], *_ = worth_of(GigpoConfig(name="gigpo", gamma=0.5), GROUP)
    assert (second, third) == pytest.approx((2 / 3 * 3**0.5, 2 / 3 * 3**0.5 + 1.0))


# --- which steps there are, and in which states -----------------------------------------------------------------------


def test_without_a_key_the_state_is_the_whole_prompt() -> None:
    """Turn 2 is a branch that goes back to before the first reply, with the second attempt's prompt."""
    first = scored([turn([1, 2], [7]), turn([3], [8], parent=0, kept=3), turn([4], [9], parent=1, kept=2)], 1.0)
    second = scored([turn([1, 2], [6]), turn([1, 2, 4], [9])], 0.0, index=1)
    (a, b, c), (d, e) = states_of(first), states_of(second)
    assert (a, c) == (d, e) and len({a, b, c}) == 3
    assert count_shared([first, second]) == (5, 4)


def test_a_key_and_a_prompt_are_never_the_same_state() -> None:
    with_key, without = scored([turn([1], [2], state="x")], 1.0), scored([turn([1], [2])], 0.0, index=1)
    assert count_shared([with_key, without]) == (2, 0)


def test_a_reply_that_was_never_seen_is_no_step_and_takes_no_time() -> None:
    """The first call was sent again: its reply counts only if a later prompt holds a part of it."""
    retried = [
        turn([1], [5, 6], is_abandoned=True),
        turn([], [7], parent=0, kept=1),
        turn([2], [8], parent=1, kept=2),
    ]
    [episode] = episodes_of([scored(retried, 4.0)], gamma=0.5)
    assert [step and step.returned for step in episode] == [None, 2.0, 4.0]
    continued = [*retried[:2], turn([2], [8], parent=0, kept=2)]
    [episode] = episodes_of([scored(continued, 4.0)], gamma=0.5)
    assert [step and step.returned for step in episode] == [1.0, 2.0, 4.0]


def test_a_last_reply_that_was_never_seen_leaves_the_reward_to_the_one_before() -> None:
    turns = [turn([1], [5]), turn([2], [6], parent=0, kept=2, is_abandoned=True)]
    [episode] = episodes_of([scored(turns, 4.0)], gamma=0.5)
    assert episode[0] is not None and (episode[0].returned, episode[1]) == (4.0, None)


def test_an_attempt_without_turns_counts_in_the_mean_and_has_no_weights() -> None:
    silent = [*GROUP, scored([], 1.0, index=3)]
    worth = worth_of(GigpoConfig(name="gigpo"), silent)
    assert worth[3] == [] and all(math.isfinite(value) for row in worth for value in row)


def test_equal_rewards_say_nothing_though_some_attempts_were_shorter() -> None:
    """Contract 4."""
    group = [played("ABB", 1.0), played("AB", 1.0, index=1)]
    assert build_algorithm(GigpoConfig(name="gigpo"), max_tokens=10).credit(group) == [0.0, 0.0]


# --- properties -------------------------------------------------------------------------------------------------------

rewards = st.floats(-10, 10).map(lambda value: round(value, 3))
groups = st.lists(st.tuples(st.text("ABC", max_size=5), rewards), min_size=1, max_size=6).map(
    lambda drawn: [played(states, reward, index=index) for index, (states, reward) in enumerate(drawn)]
)
unit = st.floats(0, 1)


@given(groups, unit, st.booleans())
def test_the_advantages_within_a_state_sum_to_zero(group: list[ScoredTrajectory], gamma: float, scale: bool) -> None:
    episodes = episodes_of(group, gamma=gamma)
    sums: dict[object, float] = {}
    for episode, worth in zip(episodes, step_advantages(episodes, scale=scale), strict=True):
        for step, value in zip(episode, worth, strict=True):
            assert step is not None
            sums[step.state] = sums.get(step.state, 0.0) + value
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-6)


@given(groups)
def test_without_a_step_weight_gigpo_is_grpo(group: list[ScoredTrajectory]) -> None:
    weights = [
        [token_weights(each, credit) for each, credit in zip(group, algorithm.credit(group), strict=True)]  # type: ignore[arg-type]
        for algorithm in (
            build_algorithm(loss, max_tokens=10) for loss in (GigpoConfig(name="gigpo", step_weight=0.0), SCALED)
        )
    ]
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(turn_trees(6))
def test_states_are_the_prompts_of_whole_trees(turns: list[Turn]) -> None:
    states = states_of(scored(turns, 1.0))
    for first in range(len(turns)):
        for second in range(first):
            same = prompt(turns, first) == prompt(turns, second)
            assert (states[first] == states[second]) == same


# --- a whole run ------------------------------------------------------------------------------------------------------


ROLLOUT = """
async def rollout(policy, scenario):
    ids, said = [10, 11, 12], []
    for number in range(2):
        policy.state(f"reply {number}")
        reply = await policy.client.completions.create(
            model=policy.model, prompt=ids, max_tokens=3, extra_body={"return_token_ids": True}
        )
        said += reply.choices[0].token_ids
        ids = [*ids, *reply.choices[0].token_ids, 20, 21]
    return sum(id % 2 for id in said) / len(said)
"""


@pytest.mark.slow
def test_a_run_compares_the_states_that_its_rollout_names(tmp_path: Path) -> None:
    """12 attempts of two replies in two states: all are shared. Between its replies each is told 20 and 21."""
    shutil.copytree(LETTERS, tmp_path / "project")
    (tmp_path / "project/rollout.py").write_text(ROLLOUT)
    overrides = [f"runs={tmp_path}/runs", "eval=null", "train.steps=2", "loss=gigpo", "loss.echo=0.1"]
    loaded = load_config(tmp_path / "project/config.yaml", overrides)
    run_dir = RunDir(asyncio.run(train(loaded)).root)
    for metrics in (line.metrics for line in run_dir.metrics()):
        assert (metrics["shared_states"], metrics["tokens_imitated"]) == (1.0, 24.0)
        assert metrics["tokens_trained"] > 24 and metrics["cross_entropy"] > 0 and metrics["logprob_gap_max"] < 1e-4
    played = [each for step in (0, 1) for each in run_dir.trajectories(step)]
    assert {tuple(turn.state for turn in each.turns) for each in played} == {("reply 0", "reply 1")}
