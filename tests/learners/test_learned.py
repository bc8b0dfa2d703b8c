"""learned.jsonl: the numbers of each trained token, against the model run one sequence at a time."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_cli.config.schema import GrpoConfig, LossConfig
from art_cli.learners.step.training_record import short_floats
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.weights import Weights
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import LearnedTrajectory, PerToken, ScoredTrajectory
from tests.support.models.gradients import chosen_logprobs, groups_of, learner, leaves, two_answers
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import sampled, scored, turn

WEIGHTS = tiny_weights(seed=3)


def learned(trained: TorchLearner, groups: list[list[ScoredTrajectory]], path: Path) -> dict[str, LearnedTrajectory]:
    trained.step(groups)
    trained.write_learned(path)
    lines = list(read_lines(path, LearnedTrajectory))
    assert [line.id for line in lines] == [t.id for group in groups for t in group]
    return {line.id: line for line in lines}


def at(values: list[PerToken], turn: int, offset: int) -> float | None:
    """The value of one sampled token."""
    found = values[turn]
    return found[offset] if isinstance(found, list) else found


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups=groups_of(), budget=st.sampled_from([12, 4096]))
def test_each_token_has_its_advantage_and_the_logprob_that_the_plain_model_gives(
    groups: list[list[ScoredTrajectory]], budget: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Trees of turns in packs: each trained token's numbers stand at its turn and its place, and nothing elsewhere.

    Of each group that tells nothing, every line says so.
    """
    for group in groups:
        for trajectory in group:
            trajectory.turns = sampled(WEIGHTS, trajectory.turns, noise=0.1, seed=trajectory.index)
    lines = learned(
        learner(WEIGHTS, micro_batch_tokens=budget, learning_rate=1e-12),
        groups,
        tmp_path_factory.mktemp("step") / "learned.jsonl",
    )
    for group in groups:
        rewards = np.array([t.reward for t in group])
        for trajectory in group:
            line, sizes = lines[trajectory.id], [len(turn.sampled_ids) for turn in trajectory.turns]
            if line.left_out is not None:
                is_equal = rewards.max() - rewards.min() <= 1e-8
                if line.left_out == "algorithm":  # of those with tokens, each has the mean reward
                    with_tokens = [each for each in group if any(turn.sampled_ids for turn in each.turns)]
                    assert all(each.reward == pytest.approx(rewards.mean(), abs=1e-6) for each in with_tokens)
                    continue
                assert line.left_out == ("no_tokens" if not any(sizes) else "no_signal" if is_equal else None)
                continue
            advantage = trajectory.reward - rewards.mean()
            trained = 0
            for ids, places in leaves(trajectory.turns):
                expected = chosen_logprobs(WEIGHTS, ids, places).tolist()
                trained += len(places)
                for (_, owner, offset), logprob in zip(places, expected, strict=True):
                    number = next(i for i, each in enumerate(trajectory.turns) if each is owner)
                    assert at(line.logprobs, number, offset) == pytest.approx(logprob, abs=1e-4)
                    assert at(line.advantages, number, offset) == pytest.approx(advantage, rel=1e-4, abs=1e-5)
            known = [at(line.logprobs, i, k) for i, size in enumerate(sizes) for k in range(size)]
            assert line.num_tokens == trained == sum(value is not None for value in known)


def test_the_shares_of_the_loss_add_up_to_it(tmp_path: Path) -> None:
    groups = [two_answers(WEIGHTS), two_answers(WEIGHTS, good=0.3, group="h")]
    trained = learner(WEIGHTS, GrpoConfig(kl=0.1, scale_advantages=False), learning_rate=1e-12)
    for group in groups:  # no longer at ratio 1, where all shares cancel
        for each in group:
            each.turns = [msgspec.structs.replace(t, logprobs=[p - 0.1 for p in t.logprobs]) for t in each.turns]
    loss = trained.step(groups).loss
    trained.write_learned(tmp_path / "learned.jsonl")
    shares = [line.loss for line in read_lines(tmp_path / "learned.jsonl", LearnedTrajectory)]
    assert math.fsum(shares) == pytest.approx(loss, rel=0, abs=1e-7) and abs(loss) > 1e-5
    assert len(set(shares)) == 4


def test_it_is_the_policy_when_the_step_first_trains_on_a_trajectory(tmp_path: Path) -> None:
    """Of three epochs the first counts. The second update of the step is computed at weights that the first changed."""
    weights = tiny_weights(seed=3)
    groups = [two_answers(weights), two_answers(weights, group="h")]
    trained = learner(weights, epochs_per_step=3, updates_per_step=2, learning_rate=1e-2)
    lines = learned(trained, groups, tmp_path / "learned.jsonl")
    for index, each in enumerate(groups[0]):
        assert lines[each.id].logprobs == [pytest.approx(each.turns[0].logprobs, abs=1e-4)], index
        later = lines[groups[1][index].id]
        assert (lines[each.id].update, later.update, later.advantages) == (0, 1, lines[each.id].advantages)
        assert later.logprobs != [pytest.approx(each.turns[0].logprobs, abs=1e-3)]


def test_what_is_masked_is_counted_with_its_reason(tmp_path: Path) -> None:
    """A reply that the client gave up on is not trained; loss.off_policy leaves out a token whose ratio is 1/e."""
    turns = sampled(WEIGHTS, [turn([1, 2, 3], [20, 21, 22]), turn([1, 2, 4], [30, 31])])
    first = turns[0]
    moved = msgspec.structs.replace(first, logprobs=[first.logprobs[0] + 1.0, *first.logprobs[1:]])
    given_up = msgspec.structs.replace(turns[1], is_abandoned=True)
    group = [scored([moved, given_up], 1.0), *two_answers(WEIGHTS)[1:], scored([], 0.5, index=2)]
    group += [scored([], None, index=3, error="timeout: too late")]
    loss: LossConfig = GrpoConfig(off_policy={"name": "icepop", "low": 0.5, "high": 2.0})
    lines = learned(learner(WEIGHTS, loss, max_staleness=1), [group], tmp_path / "learned.jsonl")
    line = lines[group[0].id]
    assert line.masked == {"abandoned": 2, "off_policy": 1}
    assert line.importance is not None and line.importance[1] is None
    assert line.importance[0] == [0.0, pytest.approx(1.0, abs=1e-3), pytest.approx(1.0, abs=1e-3)]
    assert (line.advantages[1], line.logprobs[1], line.num_tokens) == (None, None, 3)
    assert [lines[each.id].left_out for each in group] == [None, None, "no_tokens", "failed"]


def test_a_step_trains_the_same_bytes_with_the_record_and_without() -> None:
    def trained(weights: Weights, **knobs: object) -> list[bytes]:
        groups = [two_answers(weights), two_answers(weights, good=0.3, group="h")]
        made = learner(weights, GrpoConfig(kl=0.1), epochs_per_step=2, updates_per_step=2, **knobs)
        made.step(groups)
        return [parameter.detach().numpy().tobytes() for parameter in made.parameters.values()]

    assert trained(tiny_weights(seed=5)) == trained(tiny_weights(seed=5), record_learned=False)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20))
def test_short_floats_give_back_the_float32(values: list[float]) -> None:
    """0.1 as float32 is 0.100000001490116...; it is written as 0.1, which is rounded to the same float32."""
    exact = np.array(values, dtype=np.float32)
    short = short_floats(exact.astype(np.float64))
    assert np.array(short).astype(np.float32).tolist() == exact.tolist()
    assert all(len(repr(value).replace("-", "").replace(".", "").lstrip("0").split("e")[0]) <= 10 for value in short)
    assert torch.tensor(short, dtype=torch.float32).tolist() == exact.tolist()
