"""PPO's critic: advantages of turns, the value head's gradient, its checkpoints."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_cli.config.schema import PpoConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.objectives import ValueTerms, clipped_value_error
from art_cli.learners.algorithms.ppo import credit_by_values, discounted_returns, explained_variance, turn_advantages
from art_cli.learners.samples import Credit, Row
from art_cli.learners.step.step_samples import count, make_step_samples
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.weights import Weights
from art_cli.runs.manifest import hash_files
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import CheckpointError, LearnerError
from tests.support.models.gradients import (
    Caught,
    chosen_logprobs,
    distance,
    groups_of,
    in_float64,
    learner,
    leaves,
    two_answers,
)
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import sampled, scored, turn

PPO = PpoConfig(name="ppo")
WEIGHTS = tiny_weights(seed=3)
HEAD = torch.randn(32, generator=torch.Generator().manual_seed(0)).tolist()


def critic(weights: Weights, loss: PpoConfig = PPO, **knobs: object) -> TorchLearner:
    """A learner whose value head is not zero."""
    made = learner(weights, loss, **knobs)
    assert made.critic is not None
    with torch.no_grad():
        made.critic.head.weight.copy_(torch.tensor(HEAD))
        made.critic.head.bias.fill_(0.3)
    return made


def head_of(trained: TorchLearner) -> dict[str, torch.Tensor]:
    assert trained.critic is not None
    return {name: tensor.clone() for name, tensor in trained.critic.head.state_dict().items()}


# --- generalized advantage estimation ---------------------------------------------------------------------------------


def test_advantages_of_turns_by_hand() -> None:
    """gamma 0.5, lam 0.5, values 1, 2, 4, reward 8: deltas 0.5*2 - 1 = 0, 0.5*4 - 2 = 0, 8 - 4 = 4; each advantage is
    its delta plus a quarter of the next advantage: 0.25, 1, 4.
    """
    assert turn_advantages([1.0, 2.0, 4.0], 8.0, gamma=0.5, gae_lambda=0.5) == [0.25, 1.0, 4.0]


def test_a_turn_without_a_value_is_passed_over() -> None:
    found = turn_advantages([1.0, math.nan, 2.0, 4.0], 8.0, gamma=0.5, gae_lambda=0.5)
    assert [found[0], *found[2:]] == [0.25, 1.0, 4.0]
    assert math.isnan(found[1])
    returns = discounted_returns([1.0, math.nan, 2.0, 4.0], 8.0, gamma=0.5)
    assert [returns[0], *returns[2:]] == [2.0, 4.0, 8.0]


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(-5, 5), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_the_sum_that_the_paper_writes(
    values: list[float], reward: float, gamma: float, lam: float
) -> None:
    """Equation 16 of arXiv:1506.02438, summed plainly. At lam 1 it is the discounted return minus the value."""
    following = [*values[1:], 0.0]
    rewards = [0.0] * (len(values) - 1) + [reward]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=False)]
    expected = [
        sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[t:])) for t in range(len(values))
    ]
    assert turn_advantages(values, reward, gamma=gamma, gae_lambda=lam) == pytest.approx(expected, abs=1e-9)
    whole = turn_advantages(values, reward, gamma=gamma, gae_lambda=1.0)
    got = discounted_returns(values, reward, gamma=gamma)
    assert whole == pytest.approx([g - v for g, v in zip(got, values, strict=True)], abs=1e-9)


def test_explained_variance_of_exact_constant_and_opposite_values() -> None:
    """Returns 0, 1: values 0, 1 leave nothing; a constant leaves all; 1, 0 leave errors -1, 1 of four times that."""
    found = [explained_variance(values, [0.0, 1.0]) for values in ([0.0, 1.0], [0.5, 0.5], [1.0, 0.0])]
    assert found == [1.0, 0.0, -3.0]
    assert math.isnan(explained_variance([0.1, 0.2], [1.0, 1.0]))


def test_the_values_error_is_clipped_as_ppo_clips_it() -> None:
    """clip 0.2, old 0: value 0.5 for target 1 is taken as 0.2, error 0.64 without gradient; for target 0 it is 0.25."""
    new = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    error = clipped_value_error(ValueTerms(new, torch.zeros(3), torch.tensor([1.0, 0.0, 1.0])), 0.2)
    assert error.tolist() == pytest.approx([0.64, 0.25, 0.81])
    error.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 1.0, -1.8])


# --- credit over the step ---------------------------------------------------------------------------------------------


class Fixed(Algorithm):
    """PPO's credit by given values, without discounts."""

    def __init__(self, values: dict[str, list[float]]) -> None:
        self.values = values

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit]]:
        return credit_by_values(groups, self.values, gamma=1.0, gae_lambda=1.0)


def advantages_of(groups: list[list[ScoredTrajectory]], values: dict[str, list[float]]) -> dict[str, list[float]]:
    batch = make_step_samples(groups, Fixed(values))
    return {sample.trajectory_id: sample.advantages.tolist() for group in batch.groups for sample in group}


def test_all_turns_of_the_step_are_scaled_together_and_each_gives_its_tokens_its_own() -> None:
    """Values 0.5 and 0.75, reward 1: 0.5 and 0.25. Values 0.5 and 0.25, reward 0: -0.5 and -0.25. The mean is 0, the
    deviation sqrt(0.625 / 3). Both are groups of one, which say nothing to a group-relative algorithm.
    """
    talk = [turn([1, 2], [3, 4]), turn([5], [6], parent=0, kept=4)]
    groups = [[scored(talk, 1.0, group="a")], [scored(talk, 0.0, group="b")]]
    found = advantages_of(groups, {"a/0": [0.5, 0.75], "b/0": [0.5, 0.25]})
    deviation = math.sqrt(0.625 / 3)
    assert found["a/0"] == pytest.approx(np.array([0.5, 0.5, 0.25]) / deviation)
    assert found["b/0"] == pytest.approx(np.array([-0.5, -0.5, -0.25]) / deviation)


def test_advantages_that_differ_by_the_rounding_of_values_train_no_token() -> None:
    """Two attempts at one state and of one reward, in two packs: the critic's values of it differ by 1e-7."""
    batch = make_step_samples(
        [[scored([turn([1], [2 + index])], 1.0, index=index) for index in range(2)]],
        Fixed({"g/0": [0.5], "g/1": [0.5000001]}),
    )
    assert all(np.isnan(sample.advantages).all() for sample in batch.groups[0])
    assert count(batch.groups[0])[Row.VALUE].tokens == 2


def test_a_prompt_that_trajectories_share_is_a_state_of_each() -> None:
    talk = [turn([1, 2], [3]), turn([], [4], parent=0, kept=2)]  # one prompt, two replies
    groups = [[scored(talk, reward, index=index) for index, reward in enumerate((0.0, 1.0))]]
    batch = make_step_samples(groups, Fixed({"g/0": [0.5, 0.5], "g/1": [0.5, 0.5]}))
    assert count(batch.groups[0])[Row.VALUE].tokens == 4


# --- contract 1 -------------------------------------------------------------------------------------------------------


@in_float64
def reference(
    weights: Weights, groups: list[list[ScoredTrajectory]], loss: PpoConfig
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of the policy's weights and of the head, and value_loss; one sequence at a time, no shared code."""
    exact = {"dtype": torch.float64, "requires_grad": True}
    head = {"weight": torch.tensor(HEAD, **exact), "bias": torch.tensor([0.3], **exact)}  # type: ignore[arg-type]
    weights.model.zero_grad()
    rows = []  # (trajectory, ids, places, {turn: value})
    for trajectory in (each for group in groups for each in group):
        for ids, places in leaves(trajectory.turns):
            hidden = weights.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            if not loss.value_trunk:
                hidden = hidden.detach()
            values = {
                id(t): hidden[at - 1] @ head["weight"] / math.sqrt(len(HEAD)) + head["bias"][0]
                for at, t, offset in places
                if offset == 0
            }
            rows.append((trajectory, ids, places, values))
    plain: dict[int, float] = {}  # turn -> advantage
    targets: dict[int, float] = {}
    for trajectory in (each for group in groups for each in group):
        values = {k: v for t, _, _, of_row in rows if t is trajectory for k, v in of_row.items()}
        turns = [t for t in trajectory.turns if id(t) in values]
        advantage, after = 0.0, None
        for t in reversed(turns):
            value = values[id(t)].item()
            delta = (trajectory.reward if after is None else loss.gamma * after) - value
            advantage = delta + loss.gamma * loss.gae_lambda * advantage
            plain[id(t)], targets[id(t)], after = advantage, advantage + value, value
    spread = np.array(list(plain.values()))
    num_turns = len(spread)
    known = num_turns > 1 and spread.max() - spread.min() > 1e-5
    scaled = (spread - spread.mean()) / spread.std(ddof=1) if known else np.zeros(num_turns)
    worth = dict(zip(plain, scaled, strict=True))
    num_tokens = sum(len(places) for _, _, places, _ in rows)
    total, errors = torch.zeros(()), torch.zeros(())
    for _, ids, places, values in rows:
        new = chosen_logprobs(weights, ids, places)
        old = torch.tensor([t.logprobs[offset] for _, t, offset in places])
        advantages = torch.tensor([worth[id(t)] for _, t, _ in places])
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - loss.clip, 1 + loss.clip)
        total = total - torch.minimum(ratio * advantages, clipped * advantages).sum() / num_tokens
        errors = errors + sum((v - targets[key]) ** 2 for key, v in values.items()) / max(1, num_turns)
    total = total + loss.value_coefficient * errors
    if total.requires_grad:
        total.backward()
    gradient = {n: p.grad.clone() for n, p in weights.model.named_parameters() if p.grad is not None}
    gradient |= {f"head.{n}": p.grad for n, p in head.items() if p.grad is not None}
    weights.model.zero_grad()
    return gradient, float(errors.detach()) if num_turns else math.nan


@pytest.mark.slow
@pytest.mark.parametrize("moves_trunk", [False, True], ids=["head alone", "trunk too"])
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    groups=groups_of(),
    budget=st.sampled_from([1, 12, 24, 4096]),
    packing=st.sampled_from(["auto", "tree", "rows", "no packs"]),
)
def test_gradient_is_that_of_one_sequence_at_a_time(
    moves_trunk: bool, groups: list[list[ScoredTrajectory]], budget: int, packing: str
) -> None:
    """Of the policy and of the value head, for any packing and micro-batch size: equal to 1e-5 of the norm."""
    for group in groups:
        for trajectory in group:
            trajectory.turns = sampled(WEIGHTS, trajectory.turns, noise=0.1, seed=trajectory.index)
    loss = PpoConfig(name="ppo", value_trunk=moves_trunk)
    expected, value_loss = reference(WEIGHTS, groups, loss)
    shape = {"micro_batch_tokens": budget, "packing": packing.replace("no packs", "auto")}
    trained = critic(WEIGHTS, loss, max_grad_norm=1e9, **shape)
    assert trained.critic is not None
    if packing == "no packs":
        trained.runner.decide(False, "asked for")
    caught, head = Caught(trained), {}
    trained.critic.optimizer.update = lambda: head.update(  # type: ignore[method-assign]
        {f"head.{n}": p.grad.clone() for n, p in trained.critic.head.named_parameters()}
    )
    metrics = trained.step(groups)
    gradient = caught.gradient | head
    if not expected:
        assert not gradient
        return
    for part in ("base_model", "head"):
        found, own = ({n: g for n, g in each.items() if part in n} for each in (gradient, expected))
        assert distance(found, own, floor=1e-2) <= 1e-5, part
    assert metrics.value_loss == pytest.approx(value_loss, rel=1e-4)


# --- steps and checkpoints --------------------------------------------------------------------------------------------


def test_the_values_come_near_the_returns() -> None:
    """One prompt is answered in two ways, worth 1 and 0; another in two ways worth 3 both."""
    weights = tiny_weights()
    groups = [two_answers(weights)]
    for index, reward in enumerate((3.0, 3.0)):
        turns = sampled(weights, [turn([7, 8, 9, 10], [20 + index, 5])])
        groups.append([scored(turns, reward, index=index, group=f"other{index}")])
    trained = learner(weights, PpoConfig(name="ppo", value_learning_rate=0.3), max_staleness=1, learning_rate=1e-9)
    metrics = [trained.step(groups) for _ in range(30)]
    assert metrics[0].value_mean == 0
    assert metrics[0].explained_variance == pytest.approx(0)
    assert metrics[-1].value_mean == pytest.approx((0.5 + 0.5 + 3 + 3) / 4, abs=0.2)
    best = 1 - 0.125 / 1.6875  # variances of the errors -0.5, 0.5, 0, 0 and of the returns 0, 1, 3, 3
    assert metrics[-1].explained_variance == pytest.approx(best, abs=0.1)
    assert metrics[-1].value_loss < metrics[0].value_loss
    assert metrics[-1].no_signal_share == 0


def test_saved_and_loaded_the_next_step_is_bit_identical(tmp_path: Path) -> None:
    """With its optimizer offloaded too. The critic's files are hashed with the rest, and the adapter's are PEFT's."""
    weights = [tiny_weights() for _ in range(3)]
    groups = [two_answers(weights[0], group="a"), two_answers(weights[0], bad=0.5, group="b")]
    knobs = {"warmup_steps": 4, "weight_decay": 0.1, "updates_per_step": 2}
    loss = PpoConfig(name="ppo", value_trunk=True)
    first, second, offloaded = (
        learner(each, loss, offload_optimizer=on, **knobs) for each, on in zip(weights, (0, 0, 1), strict=True)
    )
    first.step(groups)
    first.save(tmp_path)
    first.step(groups)
    for again in (second, offloaded):
        again.load(tmp_path)
        again.step(groups)
        for name, parameter in first.parameters.items():
            assert torch.equal(parameter, again.parameters[name]), name
        for name, tensor in head_of(first).items():
            assert torch.equal(tensor, head_of(again)[name]), name
    assert {"critic/value_head.safetensors", "critic/optimizer.safetensors"} <= hash_files(tmp_path).keys()


def test_a_checkpoint_without_a_critic_starts_a_new_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a loss without one goes on from a checkpoint that has one."""
    plain, other = learner(tiny_weights()), critic(tiny_weights())
    for name, made in (("plain", plain), ("critic", other)):
        (tmp_path / name).mkdir()
        made.save(tmp_path / name)
    plain.load(tmp_path / "critic")
    other.load(tmp_path / "plain")
    assert "a checkpoint without a critic; its values start at 0" in caplog.text
    assert not any(tensor.any() for tensor in head_of(other).values())


def test_a_critic_of_a_model_of_another_width_is_refused(tmp_path: Path) -> None:
    wide, narrow = learner(tiny_weights(hidden=64), PPO), learner(tiny_weights(), PPO)
    assert wide.critic is not None
    assert narrow.critic is not None
    wide.critic.save(tmp_path)
    with pytest.raises(CheckpointError, match="value_head.safetensors: reads hidden states of 64 numbers, and"):
        narrow.critic.load(tmp_path)


def test_when_a_later_update_fails_the_head_is_taken_back_too() -> None:
    weights = tiny_weights()
    trained = critic(weights, updates_per_step=2)
    good, bad = two_answers(weights, group="good"), two_answers(weights, group="bad")
    [only] = bad[1].turns
    bad[1].turns = [turn(only.prompt_ids, only.sampled_ids, logprobs=[-1.0, -1000.0, -1.0])]
    before = head_of(trained)
    with pytest.raises(LearnerError, match="trajectory bad/1, turn 0: its loss is not finite; no weight was changed"):
        trained.step([good, bad])
    for name, tensor in head_of(trained).items():
        assert torch.equal(tensor, before[name]), name


def test_where_all_advantages_are_equal_the_critic_alone_is_trained() -> None:
    """One trajectory of one turn: nothing to compare its advantage with, and a target for its value."""
    weights = tiny_weights()
    trained = critic(weights, weight_decay=0.1)
    trained.step([two_answers(weights)])
    policy = {name: p.detach().clone() for name, p in trained.parameters.items()}
    before = head_of(trained)
    metrics = trained.step([two_answers(weights)[:1]])
    assert (metrics.no_signal_share, metrics.num_updates) == (1.0, 1)
    assert all(torch.equal(p, policy[name]) for name, p in trained.parameters.items())
    assert not torch.equal(head_of(trained)["weight"], before["weight"])


def test_a_step_without_a_finished_trajectory_changes_nothing() -> None:
    trained = critic(tiny_weights())
    metrics = trained.step([[scored([turn([1], [2])], None, error="timeout: 600 s")]])
    assert metrics.num_updates == 0
    assert math.isnan(metrics.value_mean)
    assert head_of(trained)["weight"].tolist() == pytest.approx(HEAD)
