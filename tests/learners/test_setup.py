"""What a learner is made with, and the members that each learner has."""

from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import GrpoConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import Learner, LearnerSetup
from art_cli.learners.processes.job import make_job
from art_cli.learners.processes.workers import ParallelLearner, Workers
from art_cli.learners.samples import COMPONENTS, Credit, Row
from art_cli.learners.torch_learner import TorchLearner
from art_cli.rollouts.rollout_runner import RolloutPlan
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS

SETTINGS = ("learner=torch", "train.learning_rate=3e-4", "rollout.sampling.max_tokens=77", "loss.kl=0.25")


def test_a_job_of_a_process_has_the_setup_of_its_configuration_also_after_it_was_sent(tmp_path: Path) -> None:
    config = load_config(LETTERS / "config.yaml", SETTINGS).config
    setup = LearnerSetup.of(config, tmp_path)
    assert (setup.sampling_max_tokens, setup.loss.kl, setup.train.rate) == (77, 0.25, 3e-4)
    job = make_job(config, "base", directory=tmp_path, dtype="float32")
    assert job.setup == type(job).model_validate_json(job.model_dump_json()).setup == setup


@pytest.mark.parametrize("kind", ["here", "processes"])
def test_a_learner_of_weights_arranges_nothing_and_pays_nothing(kind: str, tmp_path: Path) -> None:
    learner: Learner
    if kind == "here":
        setup = LearnerSetup(train=TrainConfig(learning_rate=1e-3), loss=GrpoConfig(), learner=TorchLearnerConfig())
        learner = TorchLearner(tiny_weights(), setup)
    else:
        config = load_config(LETTERS / "config.yaml", SETTINGS).config
        job = make_job(config, "base", directory=tmp_path, dtype="float32")
        learner = ParallelLearner(job, Workers(2, logs=tmp_path))
    plans = [RolloutPlan(trajectory_id="a", group_id="g", group_size=1, index=0, step=0, scenario={"id": "x"})]
    assert learner.arrange(plans) == plans and learner.payer is None
    learner.close()


def test_each_credit_is_a_row_and_the_components_are_the_first_rows() -> None:
    assert [Row[name.upper()] for name in Credit._fields] == list(Row)
    assert list(COMPONENTS) == list(Row)[: len(COMPONENTS)]
