"""Batches to train on: groups of trajectories of random tokens, whose rewards differ.

Their turns count as sampled from a cut distribution, so their logprobs are those that the learner sees: what it takes
for the old policy is then what TRL takes, its own logprobs at the first update.
"""

from collections.abc import Sequence

import numpy as np

from art_cli.config.schema import GrpoConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory, Turn

Groups = list[list[ScoredTrajectory]]
NUM_IDS = 1000  # token ids are drawn below this
SETTINGS = {"learning_rate": 1e-9, "max_grad_norm": 1.0}  # hardly moves the weights: each step repeats the one before


def make_learner(weights: Weights, **settings: object) -> TorchLearner:
    return TorchLearner(
        weights,
        LearnerSetup(
            train=TrainConfig.model_validate(SETTINGS),
            loss=GrpoConfig(),
            learner=TorchLearnerConfig.model_validate(settings),
        ),
    )


def single_turn(prompts: int, attempts: int, *, prompt: int, completion: int) -> Groups:
    """`attempts` completions of each of `prompts` prompts. With one attempt each, all are one group of many prompts."""
    random = np.random.default_rng(0)
    groups = []
    for _ in range(prompts):
        ids = _ids(random, prompt)
        groups.append([[make_turn(ids, _ids(random, completion))] for _ in range(attempts)])
    if attempts == 1:
        groups = [[turns for group in groups for turns in group]]
    return [_scored(f"g{index}", group) for index, group in enumerate(groups)]


def multi_turn(attempts: int, *, turns: int, prompt: int = 200, sampled: int = 40, reply: int = 40) -> Groups:
    """One scenario: each attempt a conversation of `turns` turns, and at every second one a sub-agent asked aside.

    The sub-agent goes on from the conversation so far with an instruction of its own and answers once; the conversation
    goes on without it.
    """
    random = np.random.default_rng(0)
    first = _ids(random, prompt)
    trajectories = []
    for _ in range(attempts):
        made: list[Turn] = []
        main, length = None, 0
        for index in range(turns):
            new = first if main is None else _ids(random, reply)
            made.append(make_turn(new, _ids(random, sampled), parent=main, kept=length))
            main, length = len(made) - 1, length + len(new) + sampled
            if index % 2:
                made.append(make_turn(_ids(random, reply), _ids(random, sampled), parent=main, kept=length))
        trajectories.append(made)
    return [_scored("g", trajectories)]


def _ids(random: np.random.Generator, num: int) -> list[int]:
    ids: list[int] = random.integers(0, NUM_IDS, num).tolist()
    return ids


def make_turn(prompt: Sequence[int], sampled: Sequence[int], *, parent: int | None = None, kept: int = 0) -> Turn:
    return Turn(
        parent=parent,
        kept=kept,
        prompt_ids=list(prompt),
        sampled_ids=list(sampled),
        logprobs=[0.0] * len(sampled),
        raw_logprobs=None,
        step=0,
        temperature=1.0,
        top_p=0.99,
    )


def _scored(group: str, trajectories: Sequence[list[Turn]]) -> list[ScoredTrajectory]:
    return [
        ScoredTrajectory(
            id=f"{group}/{index}",
            group_id=group,
            group_size=len(trajectories),
            index=index,
            turns=turns,
            reward=float(index % 3),
        )
        for index, turns in enumerate(trajectories)
    ]
