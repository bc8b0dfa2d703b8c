"""Job: everything a process needs to build its part of a learner, as plain data."""

from dataclasses import fields
from pathlib import Path

from art_cli.config import schema
from art_cli.learners import LearnerSetup


class Job(schema.Section):
    """Sent as JSON to processes on this machine. It never leaves this machine."""

    base: str
    """A hub id or directory."""
    model: schema.ModelConfig
    train: schema.TrainConfig
    loss: schema.LossConfig | schema.AlgorithmConfig
    directory: Path = Path()
    """Base directory for a user's algorithm path."""
    learner: schema.TorchLearnerConfig
    sft: schema.SftConfig | None
    sampling_max_tokens: int

    @property
    def setup(self) -> LearnerSetup:
        return LearnerSetup(**{each.name: getattr(self, each.name) for each in fields(LearnerSetup)})


def make_job(config: schema.RunConfig, base: str, *, directory: Path, dtype: str) -> Job:
    """Returns the job for a configuration with a torch learner. `base` is the base model's path on this machine."""
    assert isinstance(config.learner, schema.TorchLearnerConfig), (
        f"a learner with its own processes, not {config.learner}"
    )
    model = config.model.model_copy(update={"dtype": dtype})  # the same dtype in all processes
    return Job(base=base, model=model, **vars(LearnerSetup.of(config, directory)))
