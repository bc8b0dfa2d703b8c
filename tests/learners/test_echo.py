"""ECHO: the cross entropy of what the environment answered; and the gradient of credit per turn, token by token."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_cli.config.schema import GrpoConfig, LossConfig
from art_cli.learners.algorithms.gigpo import GigpoConfig
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.samples import Credit, Row, observed_tokens
from art_cli.learners.step.step_samples import count, make_step_samples
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory, has_signal, sequence
from tests.support.models.gradients import (
    MAX_TOKENS,
    Caught,
    chosen_logprobs,
    distance,
    groups_of,
    in_float64,
    learner,
    leaves,
)
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import logprobs_of, sampled, scored, turn

WEIGHTS = tiny_weights(seed=3)


def talk(reward: float, *, index: int = 0, group: str = "g") -> ScoredTrajectory:
    """1 2 [3 4] 5 6 [7]: the tokens 5 and 6 are the environment's answer to 3 4."""
    turns = [turn([1, 2], [3, 4]), turn([5, 6], [7], parent=0, kept=4)]
    return scored(sampled(WEIGHTS, turns), reward, index=index, group=group)


def test_the_environments_tokens_are_those_that_a_turn_adds_behind_a_reply() -> None:
    turns = [
        turn([1, 2], [3, 4]),  # the first prompt
        turn([5], [6], parent=0, kept=4),  # an answer
        turn([7], [8], parent=1, kept=4),  # another answer to turn 0's reply, which the latest turn holds too
        turn([7], [8], parent=1, kept=3),  # turn 0's reply is cut and rendered anew
        turn([1, 1], [2], parent=0, kept=1),  # a branch inside the first prompt: another conversation
        turn([3], [3]),  # a tree of its own
    ]
    added = [t.prompt_ids for t in turns]
    is_answer = iter(observed_tokens(scored(turns, 1.0)))
    found = [[next(is_answer) for _ in [*t.prompt_ids, *t.sampled_ids]][: len(t.prompt_ids)] for t in turns]
    assert [ids for ids, here in zip(added, found, strict=True) if all(here)] == [[5], [7]]
    assert sum(map(sum, found)) == sum(observed_tokens(scored(turns, 1.0))) == 2


def test_an_answer_belongs_to_the_call_that_was_made_twice_once() -> None:
    turns = [turn([1], [2]), turn([3], [4], parent=0, kept=2, is_abandoned=True), turn([], [5], parent=1, kept=3)]
    assert observed_tokens(scored(turns, 1.0)).tolist() == [False, False, True, False, False]
    assert len(observed_tokens(scored([], 1.0))) == 0


def test_they_are_counted_apart_and_in_groups_without_signal_too() -> None:
    groups = [[talk(1.0, index=0, group="a"), talk(0.0, index=1, group="a")], [talk(0.0), talk(0.0, index=1)]]
    algorithm = build_algorithm(GrpoConfig(), max_tokens=MAX_TOKENS)
    batch = make_step_samples(groups, algorithm, kl=0.1, echo=0.5)
    signal, silent = batch.groups
    assert [counts[:3] for counts in count(signal)] == [(6, 2, 2), (4, 2, 2), (6, 2, 2), (0, 0, 0)]
    assert [counts[:3] for counts in count(silent)] == [(0, 0, 0), (4, 2, 2), (0, 0, 0), (0, 0, 0)]
    assert batch.no_signal_share == 0.5
    assert {float(weight) for sample in silent for weight in sample.weights[Row.CROSS_ENTROPY]} == {0.5}


def test_what_an_algorithm_says_of_a_token_stays() -> None:
    class Own(type(build_algorithm(GrpoConfig(), max_tokens=1))):  # type: ignore[misc]
        def credit(self, group: object) -> list[Credit]:
            nan = math.nan
            return [Credit(policy=1.0, cross_entropy=[[nan] * 4, [9.0, nan, nan]])]

    [[sample]] = make_step_samples([[talk(1.0)]], Own(GrpoConfig(), 1), echo=0.5).groups
    imitated = sample.weights[Row.CROSS_ENTROPY]
    assert imitated[~torch.tensor(imitated).isnan().numpy()].tolist() == [9.0, 0.5]


def test_a_group_where_all_failed_teaches_what_the_environment_answers_and_nothing_else() -> None:
    """Contract 4 for the policy: the loss is 0.5 times the mean of -log p of 5 and 6 in both attempts."""
    weights = tiny_weights(seed=3)
    group = [talk(0.0), talk(0.0, index=1)]
    before = -logprobs_of(weights, [1, 2, 3, 4, 5, 6, 7]).detach()[3:5]
    metrics = learner(weights, GrpoConfig(echo=0.5)).step([group])
    assert (metrics.no_signal_share, metrics.num_updates) == (1.0, 1)
    assert (metrics.tokens_trained, metrics.tokens_imitated) == (4, 4)
    assert metrics.cross_entropy == pytest.approx(float(before.mean()), abs=1e-5)
    assert metrics.loss == pytest.approx(0.5 * float(before.mean()), abs=1e-5)
    assert math.isnan(metrics.entropy) and math.isnan(metrics.clip_fraction)
    after = -logprobs_of(weights, [1, 2, 3, 4, 5, 6, 7]).detach()[3:5]
    assert float(after.mean()) < float(before.mean())


def test_without_echo_nothing_is_imitated_and_no_number_is_told() -> None:
    metrics = learner(tiny_weights(seed=3)).step([[talk(0.0), talk(1.0, index=1)]])
    assert metrics.tokens_imitated == 0 and "cross_entropy" not in metrics.known()


# --- contract 1 -------------------------------------------------------------------------------------------------------


@in_float64
def reference_gradient(
    weights: Weights, groups: list[list[ScoredTrajectory]], loss: GrpoConfig | GigpoConfig
) -> dict[str, torch.Tensor]:
    """One sequence at a time: PPO's clip with each turn's value, and the cross entropy of each answer once."""
    terms, answers = [], []
    weights.model.zero_grad()
    for trajectory, values in credited(groups, loss):
        for ids, places in leaves(trajectory.turns) if values is not None else []:
            new = chosen_logprobs(weights, ids, places)
            old = torch.tensor([t.logprobs[offset] for _, t, offset in places])
            worth = torch.tensor([values[id(t)] for _, t, _ in places])
            ratio = (new - old).exp()
            terms += list(-torch.minimum(ratio * worth, ratio.clamp(1 - loss.clip, 1 + loss.clip) * worth))
        for index, t in enumerate(trajectory.turns):
            ids = sequence(trajectory.turns, index)
            if t.kept in reply_ends(trajectory, index):
                first = t.kept - 1
                answers += list(-logprobs_of(weights, ids)[first : first + len(t.prompt_ids)])
    for part, weight in ((terms, 1.0), (answers, loss.echo)):
        if part and weight:
            (weight * torch.stack(part).mean()).backward()
    gradient = {n: p.grad.clone() for n, p in weights.model.named_parameters() if p.grad is not None}
    weights.model.zero_grad()
    return gradient


def reply_ends(trajectory: ScoredTrajectory, index: int) -> set[int]:
    """The lengths of those earlier turns' sequences that the turn's own begins with, along the path to it."""
    parent, ends = trajectory.turns[index].parent, set[int]()
    kept = trajectory.turns[index].kept
    while parent is not None:
        length = len(sequence(trajectory.turns, parent))
        ends |= {length} if length <= kept else set()
        kept = min(kept, trajectory.turns[parent].kept)
        parent = trajectory.turns[parent].parent
    return ends


def credited(
    groups: list[list[ScoredTrajectory]], loss: LossConfig
) -> list[tuple[ScoredTrajectory, dict[int, float] | None]]:
    """Each trajectory with the value of each of its turns; None: its group's values are all zero."""
    found: list[tuple[ScoredTrajectory, dict[int, float] | None]] = []
    for group in groups:
        if not has_signal([each.reward or 0.0 for each in group]):
            found += [(each, None) for each in group]
            continue
        worth = []
        for each, credit in zip(group, build_algorithm(loss, max_tokens=MAX_TOKENS).credit(group), strict=True):
            rows = credit.policy if isinstance(credit, Credit) else [[credit]] * len(each.turns)
            pairs = zip(each.turns, rows, strict=True)  # type: ignore[arg-type]
            worth.append((each, {id(t): float(row[-1]) for t, row in pairs if t.sampled_ids}))  # type: ignore[arg-type]
        says_something = any(value for _, values in worth for value in values.values())
        found += [(each, values if says_something else None) for each, values in worth]
    return found


LOSSES: dict[str, LossConfig] = {
    "grpo and echo": GrpoConfig(mean_over="trained", echo=0.3),
    "gigpo and echo": GigpoConfig(name="gigpo", mean_over="trained", echo=0.3, gamma=0.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(groups=groups_of(), budget=st.sampled_from([1, 12, 24, 4096]), packing=st.sampled_from(["auto", "tree", "rows"]))
def test_gradient_is_that_of_one_sequence_at_a_time(
    loss: LossConfig, groups: list[list[ScoredTrajectory]], budget: int, packing: str
) -> None:
    for trajectory in (trajectory for group in groups for trajectory in group):
        trajectory.turns = sampled(WEIGHTS, trajectory.turns, noise=0.1, seed=trajectory.index)
    expected = reference_gradient(WEIGHTS, groups, loss)  # type: ignore[arg-type]
    caught = Caught(learner(WEIGHTS, loss, micro_batch_tokens=budget, packing=packing, max_grad_norm=1e9))
    caught.learner.step(groups)
    assert distance(caught.gradient, expected, floor=1e-3) <= 1e-5
