"""Teachers: models that score the policy's sampled tokens with logprobs.

SDPO's teacher (algorithms/sdpo.py) is not a separate model: it is the policy itself, given the judge's explanation.
"""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from art_cli.config.sections.loss_config import TeacherConfig
from art_cli.learners.packs.logprob_reader import Reader
from art_cli.learners.samples import Floats, Sample

TINKER_TEACHER = "art_cli.tinker.tinker_teacher:TinkerTeacher"  # a teacher on a Tinker protocol server


class Teacher(Protocol):
    """A model with the policy's vocabulary."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] per sample: log p of its targets, in nats, at the sampling temperatures.

        All learner processes call it with the same samples. Raises LearnerError if the teacher cannot be asked.
        """


def make_teacher(config: TeacherConfig, policy: Reader, directory: Path) -> Teacher:
    """Returns the configured teacher; model paths are relative to `directory`.

    Raises UsageError if it cannot be loaded or its vocabulary differs from the policy's; LearnerError if the server
    does not answer.
    """
    if config.base_url is not None and config.protocol == "tinker":
        made: Teacher = resolve_name(TINKER_TEACHER)(config, directory, ranks=policy.runner.ranks)
        return made
    if config.base_url is not None:
        from art_cli.learners.teachers.teacher_server import ServerTeacher

        return ServerTeacher(config, policy.runner.weights.tokenizer, directory, ranks=policy.runner.ranks)
    from art_cli.learners.teachers.local_teacher import LocalTeacher

    return LocalTeacher(config.model, policy, directory)
