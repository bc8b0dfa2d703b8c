"""Groups that every preset can be trained on, and the knobs that some need."""

from typing import Any

from pydantic import TypeAdapter

from art_cli.config.schema import LossConfig
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory
from tests.support.records.trees import sampled, scored, turn

NEEDED: dict[str, dict[str, Any]] = {  # by preset
    "gdpo": {"reward_parts": {"reward": 1.0, "brevity": -0.5}},
    "sdpo": {"reward_weight": 1.0},  # no judge explains these attempts
}


def config_of(name: str, **knobs: Any) -> LossConfig:
    config: LossConfig = TypeAdapter(LossConfig).validate_python({"name": name, **NEEDED.get(name, {}), **knobs})
    return config


def made_groups(weights: Weights) -> list[list[ScoredTrajectory]]:
    """Two groups of three: answers that share a beginning, later turns that go on or branch, a group of equal rewards.

    Logprobs are off by some noise, so that ratios are not 1.
    """
    trees = [
        [turn([1, 2, 3], [20, 21, 22])],
        [turn([1, 2, 3], [20, 31]), turn([7], [8, 9], parent=0, kept=5), turn([5], [6], parent=0, kept=4)],
        [turn([1, 2, 3], [40, 41, 42, 43, 44]), turn([7], [3], parent=0, kept=8)],
    ]
    rewards = {"a": [1.0, 0.0, 0.25], "b": [0.0, 0.0, 2.0], "c": [0.5, 0.5, 0.5]}
    return [
        [
            scored(
                sampled(weights, trees[index], noise=0.1, seed=index),
                reward,
                index=index,
                group=name,
                metrics={"brevity": [1.0, 3.0, 5.0][index] * (name != "c")},
            )
            for index, reward in enumerate(of_group)
        ]
        for name, of_group in rewards.items()
    ]
