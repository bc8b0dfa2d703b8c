"""Trial updates: made-up attempts suit every loss that learns from numbers, and others say that they were not tried."""

import pytest

from art_cli.config.schema import GrpoConfig, LossConfig
from art_cli.learners.algorithms.gdpo import GdpoConfig
from art_cli.learners.algorithms.sdpo import SdpoConfig
from art_cli.loop import trial_update
from tests.support.models.gradients import learner
from tests.support.models.tiny import tiny_weights


@pytest.mark.parametrize(
    ("loss", "num_updates"),
    [
        (GrpoConfig(), 1),
        (GdpoConfig(name="gdpo", reward_parts={"win": 1.0, "reward": 0.5}), 1),
        (SdpoConfig(name="sdpo"), 0),  # learns from explanations, which made-up attempts have none of
    ],
)
def test_a_step_on_made_up_attempts(loss: LossConfig, num_updates: int) -> None:
    weights = tiny_weights()
    metrics = trial_update.step(learner(weights, loss), 12, vocabulary=weights.vocabulary, parts=loss.parts)
    assert metrics.num_updates == num_updates
