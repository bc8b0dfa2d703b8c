"""A user's own algorithm: the class on docs/algorithms.md, loaded from a file beside the configuration."""

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from art_cli.config.compose import load_config
from art_cli.config.schema import AlgorithmConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop.references import check_ready
from art_cli.loop.train import train
from art_cli.models.weights import Weights
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ConfigError, LearnerError, RunError, UsageError
from tests.support.models.gradients import Caught, two_answers
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS, ROOT
from tests.support.records.trees import logprobs_of, sequence

PAGE = (ROOT / "docs/algorithms.md").read_text()
[MINE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[SECTION] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """tests/letters, with the page's class and section."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "mine.py").write_text(MINE)
    with (project / "config.yaml").open("a") as file:
        file.write(SECTION)
    return project


def learner(directory: Path, source: str, weights: Weights | None = None, **section: object) -> TorchLearner:
    (directory / "mine.py").write_text(source)
    return TorchLearner(
        weights or tiny_weights(),
        LearnerSetup(
            train=TrainConfig(learning_rate=1e-5, max_grad_norm=1e9, epochs_per_step=1),
            loss=AlgorithmConfig(**{"entry": "mine.py:Mine", **section}),
            learner=TorchLearnerConfig(),
            directory=directory,
        ),
    )


def run(project: Path, *overrides: str) -> RunDir:
    loaded = load_config(project / "config.yaml", [f"runs={project.parent / 'runs'}", "eval=null", *overrides])
    return RunDir(asyncio.run(train(loaded)).root)


@pytest.mark.slow
def test_a_whole_run_trains_with_it(project: Path) -> None:
    """Seen: the reward goes from 0.2 to 0.5 in 8 steps."""
    run_dir = run(project, "train.steps=8", "train.learning_rate=0.1", "train.max_kl=null", "rollout.group_size=8")
    lines = [line.metrics for line in run_dir.metrics()]
    assert lines[-1]["reward_mean"] > lines[0]["reward_mean"] + 0.15
    assert "clip_fraction" not in lines[0]
    recorded = json.loads(run_dir.config_path.read_text())["algorithm"]
    assert recorded.items() >= {"entry": "mine.py:Mine", "options": {"scale": 2.0}, "kl": 0.0}.items()


@pytest.mark.slow
def test_with_another_option_it_is_another_run(project: Path) -> None:
    run(project, "train.steps=1")
    with pytest.raises(RunError, match=r"algorithm\.options\.scale: 2\.0 -> 3\.0"):
        run(project, "train.steps=2", "algorithm.options.scale=3.0")


def test_its_gradient_is_its_own_formula(tmp_path: Path) -> None:
    """Rewards 1 and 0, median 1/2: advantages 2 * (+-1/2) on three tokens each, mean over six tokens of -A log p."""
    weights = tiny_weights()
    group = two_answers(weights)
    caught = Caught(learner(tmp_path, MINE, weights, options={"scale": 2.0}))
    caught.learner.step([group])
    weights.model.zero_grad()
    better, worse = (logprobs_of(weights, sequence(t.turns, 0))[2:].sum() for t in group)
    (-(better - worse) / 6).backward()
    for name, parameter in weights.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(caught.gradient[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_names_the_step_and_the_run_goes_on_once_it_is(project: Path) -> None:
    """The square root's slope at 0 is infinite, and 0 times infinity is not a number."""
    power = f"0.5 if __import__('os').path.exists('{project / 'bad'}') else 2"
    term = f"(terms.new - terms.new.detach()).abs().pow({power})"
    (project / "mine.py").write_text(MINE.replace("* terms.new)", f"* terms.new + {term})"))
    (project / "bad").touch()
    with pytest.raises(
        LearnerError, match=r"^step 1/4: trajectory .*: its gradient is not finite; no weight was"
    ) as no:
        run(project)
    assert "lower train.learning_rate" in str(no.value) and "the same command tries the step again" in str(no.value)
    (project / "bad").unlink()
    assert run(project).checkpoint_steps()[-1] == 4


def problems(project: Path, *overrides: str) -> Sequence[str]:
    with pytest.raises(ConfigError) as caught:
        check_ready(load_config(project / "config.yaml", list(overrides)), ("algorithm",))
    return str(caught.value).splitlines()


def test_it_takes_the_place_of_a_loss_and_both_are_refused(project: Path) -> None:
    [line] = problems(project, "loss=dapo")
    assert "algorithm: takes the place of 'loss', which is set too; leave one of them out" in line


def test_knobs_that_it_shares_with_a_loss_are_checked_under_its_own_name(project: Path) -> None:
    [line] = problems(project, "train.max_staleness=1", "engine={name: embedded}")
    assert "train.max_staleness: " in line and "set algorithm.off_policy.name (truncate is usual)" in line
    [line] = problems(project, "algorithm.kl=0.1", "model.lora=null")
    assert "algorithm.kl: needs model.lora" in line


def test_a_file_or_class_that_is_not_there_is_told_before_anything_runs(project: Path) -> None:
    assert "algorithm.entry: mine.py has no 'Mein'; did you mean 'Mine'?" in problems(
        project, "algorithm.entry=mine.py:Mein"
    )[0].replace(f"{project}/", "")
    assert "min.py: no such file; did you mean 'mine.py'?" in problems(project, "algorithm.entry=min.py:Mine")[0]


HEAD = "from art_cli.learners.algorithms import Algorithm, Objective\n\n\nclass Mine(Algorithm):\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Mine:\n    pass\n", r"mine.py:Mine: not a class that extends art_cli.learners.algorithms.Algorithm"),
        ("Mine = 3\n", "not a class that extends"),
        (HEAD + "    def __init__(self, scale):\n        pass\n", "missing 1 required .* 'scale'"),
        (HEAD + "    def __init__(self):\n        1 / 0\n", r"ZeroDivisionError: division by zero \(mine.py:6\)"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        learner(tmp_path, source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def credit(self, group):\n        return [1.0]", "credit gave 1 values for 2 trajectories"),
        ("def credit(self, group):\n        return [1.0, float('nan')]", "credit gave nan, not a finite number"),
        ("def credit(self, group):\n        return group[9]", r"credit: IndexError: .* \(mine.py:6\)"),
        ("def credit_step(self, groups):\n        return [[1.0]]", "credit_step gave 1 values for 2 trajectories"),
        ("def credit_step(self, groups):\n        return []", "credit_step gave 0 lists for 1 groups"),
        ("def credit_step(self, groups):\n        return [['a', 1.0]]", "credit_step gave 'a', not a finite number"),
        ("def credit_step(self, groups):\n        return 3", r"credit_step: TypeError: "),
        ("def numbers(self):\n        return {'kl': 'x'}", "numbers gave 'x', not a finite number"),
        ("def numbers(self):\n        return {'mine': 1.0}", "numbers gave 'mine', which StepMetrics does not have"),
        ("def objective(self, terms):\n        return terms.new", "must return an Objective, not Tensor"),
        ("def objective(self, terms):\n        return Objective(terms.new.sum())", r"values have the shape \[\], and"),
        ("def share(self, num_tokens, update):\n        return 1 / 0", r"share: ZeroDivisionError.* \(mine.py:6\)"),
        ("def share(self, num_tokens, update):\n        return 'all'", "share gave 'all', not a finite number"),
    ],
)
def test_what_it_gives_is_checked_and_no_weight_is_changed(tmp_path: Path, method: str, message: str) -> None:
    weights = tiny_weights()
    trained = learner(tmp_path, HEAD + f"    {method}\n", weights)
    before = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
    with pytest.raises(LearnerError, match=f"mine.py:Mine: .*{message}"):
        trained.step([two_answers(weights)])
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.parameters.items())
    assert all(parameter.grad is None for parameter in trained.parameters.values())


READS = """
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.distillation import sampled_tokens


class Mine(Algorithm):
    def bind(self, policy, directory):
        self.policy, self.note = policy, (directory / "note").read_text()

    def credit(self, group):
        samples = [sampled_tokens(trajectory)[0] for trajectory in group]
        return [float(self.note) * float(logprobs.sum()) for logprobs in self.policy.logprobs(samples)]
"""


def test_its_credit_may_ask_the_policy_for_logprobs(tmp_path: Path) -> None:
    """The advantage of each attempt is twice its own logprob, and the loss from ratio 1 is -mean over tokens of it."""
    (tmp_path / "note").write_text("2")
    weights = tiny_weights()
    group = two_answers(weights)
    metrics = learner(tmp_path, READS, weights).step([group])
    values = [2 * sum(trajectory.turns[0].logprobs) for trajectory in group]
    assert metrics.loss == pytest.approx(-sum(values) / 2, rel=1e-5)
    (tmp_path / "note").unlink()
    with pytest.raises(LearnerError, match=r"mine.py:Mine: bind: FileNotFoundError.* \(mine.py:8\)"):
        learner(tmp_path, READS, weights)


REMEMBERS = """
from art_cli.learners.algorithms import Algorithm


class Mine(Algorithm):
    num_steps = 0

    def after_step(self):
        self.num_steps += 1

    def save(self, directory):
        (directory / "mine.txt").write_text(str(self.num_steps))

    def load(self, directory):
        self.num_steps = int((directory / "mine.txt").read_text())

    def numbers(self):
        return {"teacher_kl": float(self.num_steps)}
"""


def test_what_it_remembers_is_in_the_checkpoint_and_its_numbers_in_the_metrics(tmp_path: Path) -> None:
    weights = tiny_weights()
    first, second = learner(tmp_path, REMEMBERS, weights), learner(tmp_path, REMEMBERS, tiny_weights())
    assert first.step([two_answers(weights)]).teacher_kl == 0
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert second.step([two_answers(weights)]).teacher_kl == 1
    (tmp_path / "saved/mine.txt").unlink()
    with pytest.raises(LearnerError, match=r"mine.py:Mine: load: FileNotFoundError.* \(mine.py:15\)"):
        second.load(tmp_path / "saved")


FAILS_AFTER = """
from art_cli.learners.algorithms import Algorithm


class Mine(Algorithm):
    def after_step(self):
        raise ValueError("no")
"""

ASKS_FOR_A_REFERENCE = """
from art_cli.learners.algorithms import Algorithm, Credit


class Mine(Algorithm):
    def credit(self, group):
        return [Credit(policy=1.0, reference_kl=0.01) for _ in group]
"""


def test_an_error_after_the_step_takes_its_update_back(tmp_path: Path) -> None:
    weights = tiny_weights()
    mine = learner(tmp_path, FAILS_AFTER, weights)
    before = {name: value.clone() for name, value in mine.parameters.items()}
    with pytest.raises(LearnerError, match="after_step: ValueError: no"):
        mine.step([two_answers(weights)])
    assert all(torch.equal(before[name], value) for name, value in mine.parameters.items())
    assert mine.optimizer.counts.num_steps == 0


def test_a_reference_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    weights = tiny_weights(lora_rank=None)
    with pytest.raises(LearnerError, match="reference_kl needs a reference, the model without its adapter"):
        learner(tmp_path, ASKS_FOR_A_REFERENCE, weights).step([two_answers(weights)])
