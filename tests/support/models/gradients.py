"""The gradient of a step, worked out one sequence at a time, and what tests of learners compare with it."""

import functools
import math
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from hypothesis import strategies as st

from art_cli.config.schema import (
    AlgorithmConfig,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    LossConfig,
    TorchLearnerConfig,
    TrainConfig,
    TruncateConfig,
)
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory, Turn, sequence
from tests.support.records.trees import logprobs_of, sampled, scored, turn, turn_trees

P = ParamSpec("P")
Found = TypeVar("Found")

MAX_TOKENS = 16


def learner(weights: Weights, loss: LossConfig | AlgorithmConfig | None = None, **knobs: object) -> TorchLearner:
    shape = {name: knobs.pop(name) for name in list(knobs) if name in TorchLearnerConfig.model_fields}
    return TorchLearner(
        weights,
        LearnerSetup(
            train=TrainConfig(**{"learning_rate": 1e-3, "epochs_per_step": 1, "max_logprob_gap": 10.0, **knobs}),
            loss=loss or GrpoConfig(),
            learner=TorchLearnerConfig(**shape),
            sampling_max_tokens=MAX_TOKENS,
        ),
    )


@st.composite
def groups_of(draw: st.DrawFn) -> list[list[ScoredTrajectory]]:
    groups = []
    for name in ("a", "b"):
        size = draw(st.integers(2, 4))
        rewards = draw(st.lists(st.floats(-2, 2), min_size=size, max_size=size))
        groups.append(
            [
                scored(draw(turn_trees(draw(st.integers(1, 4)))), reward, index=index, group=name)
                for index, reward in enumerate(rewards)
            ]
        )
    return groups


def in_float64(reference: Callable[Concatenate[Weights, P], Found]) -> Callable[Concatenate[Weights, P], Found]:
    """Works a reference out in float64, lest its own rounding be what is compared.

    Each value of float32 is one of float64, so that the weights are afterwards what they were.
    """

    @functools.wraps(reference)
    def exact(weights: Weights, *arguments: P.args, **knobs: P.kwargs) -> Found:
        assert {parameter.dtype for parameter in weights.model.parameters()} == {torch.float32}
        weights.model.double()
        try:
            return reference(weights, *arguments, **knobs)
        finally:
            weights.model.float()

    return exact


@in_float64
def reference_gradient(
    weights: Weights, groups: list[list[ScoredTrajectory]], loss: LossConfig
) -> dict[str, torch.Tensor]:
    """One sequence at a time, written out plainly: no packing, no shared code but the model.

    A sampled token is trained in the first leaf turn that holds it; a sequence is such a leaf. What the mean is over:
    with `mean_over` all, those of groups without signal too.
    """
    sequences, num_tokens, num_sequences, num_trajectories = [], 0, 0, 0
    for group in groups:
        rewards = torch.tensor([t.reward for t in group], dtype=torch.float64)
        has_signal = bool(rewards.max() - rewards.min() > 1e-8)
        if has_signal or loss.mean_over == "all":
            found = [leaves(trajectory.turns) for trajectory in group]
            num_tokens += sum(len(places) for each in found for _, places in each)
            num_sequences += sum(map(len, found))
            num_trajectories += sum(map(bool, found))
        if not has_signal:
            continue
        for trajectory, reward in zip(group, rewards, strict=True):
            advantage = reward - rewards.mean()
            if not isinstance(loss, DrGrpoConfig) and loss.scale_advantages:
                advantage = advantage / rewards.std()
            sequences += [(float(advantage), *leaf) for leaf in leaves(trajectory.turns)]
    weights.model.zero_grad()
    for advantage, ids, places in sequences:
        new = chosen_logprobs(weights, ids, places)
        engine = torch.tensor([t.logprobs[offset] for _, t, offset in places])
        old = new.detach() if loss.off_policy or isinstance(loss, GspoConfig) else engine
        ratio = (new - old).exp()
        if isinstance(loss, GspoConfig):
            ratio = (new - old).mean().exp().expand(len(new))
        if isinstance(loss, CispoConfig):
            terms = -ratio.detach().clamp(1 - loss.clip, 1 + loss.clip_high) * advantage * new
        else:
            high = loss.clip_high if isinstance(loss, DapoConfig | GspoConfig) else loss.clip
            terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - loss.clip, 1 + high) * advantage)
        if isinstance(loss.off_policy, TruncateConfig):
            terms = terms * (new.detach() - engine).exp().clamp(max=loss.off_policy.cap)
        if loss.kl:
            with torch.no_grad(), weights.adapter_off():
                reference = chosen_logprobs(weights, ids, places)
            terms = terms + loss.kl * ((reference - new).exp() - (reference - new) - 1)
        if isinstance(loss, GspoConfig):
            value = terms.mean() / num_sequences
        elif isinstance(loss, DrGrpoConfig):
            value = terms.sum() / MAX_TOKENS / num_trajectories
        else:
            value = terms.sum() / num_tokens
        value.backward()
    gradient = {n: p.grad.clone() for n, p in weights.model.named_parameters() if p.grad is not None}
    weights.model.zero_grad()
    return gradient


def chosen_logprobs(weights: Weights, ids: list[int], places: list[tuple[int, Turn, int]]) -> torch.Tensor:
    """[N] the logprob of each place's token, at the temperature of the turn that sampled it."""
    rows = {t.temperature: logprobs_of(weights, ids, t.temperature) for _, t, _ in places}
    return torch.stack([rows[t.temperature][place - 1] for place, t, _ in places])


def leaves(turns: list[Turn]) -> list[tuple[list[int], list[tuple[int, Turn, int]]]]:
    """(token ids, [(place in them, the turn that sampled it, offset in that turn), ...]) of each leaf."""
    whole = {t.parent for t in turns if t.parent is not None and t.kept == len(sequence(turns, t.parent))}
    taken, found = set(), []
    for index in range(len(turns)):
        if index in whole:
            continue
        origin: list[tuple[int, int] | None] = origins(turns, index)
        places = [(i, *o) for i, o in enumerate(origin) if o is not None and i > 0 and o not in taken]
        taken |= {(t, offset) for _, t, offset in places}
        if places:
            found.append((sequence(turns, index), [(i, turns[t], offset) for i, t, offset in places]))
    return found


def origins(turns: list[Turn], index: int) -> list[tuple[int, int] | None]:
    t = turns[index]
    kept = origins(turns, t.parent)[: t.kept] if t.parent is not None else []
    return [*kept, *[None] * len(t.prompt_ids), *[(index, offset) for offset in range(len(t.sampled_ids))]]


class Caught:
    """Stands in for the optimizer's update: keeps the gradient, changes nothing."""

    def __init__(self, learner: TorchLearner) -> None:
        self.learner, self.gradient = learner, {}
        learner.optimizer.update = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> None:
        self.gradient = {n: p.grad.clone() for n, p in self.learner.parameters.items() if p.grad is not None}
        self.learner.optimizer.clear()


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, floor: float = 0.0) -> float:
    """|found - expected| / (|expected| + floor), each gradient taken as one vector; contract 1 allows 1e-5.

    `floor` is for drawn groups whose gradients may cancel, where the rounding of what cancelled is left to compare.
    """
    assert found.keys() == expected.keys()
    error = math.sqrt(sum(float((found[name] - value).square().sum()) for name, value in expected.items()))
    return error / (math.sqrt(sum(float(value.square().sum()) for value in expected.values())) + floor)


def two_answers(weights: Weights, *, good: float = 1.0, bad: float = 0.0, group: str = "g") -> list[ScoredTrajectory]:
    """One prompt, two one-turn trajectories that answered it differently."""
    answers = [[20, 21, 22], [20, 31, 32]]
    return [
        scored(sampled(weights, [turn([1, 2, 3], answer)]), reward, index=index, group=group)
        for index, (answer, reward) in enumerate(zip(answers, (good, bad), strict=True))
    ]
