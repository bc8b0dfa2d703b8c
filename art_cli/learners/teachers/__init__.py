"""Teachers: models that give their logprobs of what the policy sampled.

local_teacher.py   a model in this process: a directory, a hub id, a run or a checkpoint
teacher_server.py  a vLLM server, asked over HTTP; refuses a teacher that reads other tokens than the policy writes

The teacher of algorithms/sdpo.py is no other model: the policy itself, after it has read what the judge said of the
attempt.
"""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from art_cli.config.sections.loss_config import TeacherConfig
from art_cli.learners.packs.logprob_reader import Reader
from art_cli.learners.samples import Floats, Sample

TINKER_TEACHER = "art_cli.tinker.tinker_teacher:TinkerTeacher"  # a teacher on a server of the Tinker protocol


class Teacher(Protocol):
    """A model with the policy's vocabulary."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] of each sample: log p of its targets, in nats, at the temperatures that they were sampled with.

        All processes of a learner call it with the same samples. Raises LearnerError if it cannot be asked.
        """


def make_teacher(config: TeacherConfig, policy: Reader, directory: Path) -> Teacher:
    """Returns the teacher of that section; a model's path is relative to `directory`.

    Raises UsageError if it cannot be loaded or its vocabulary is not the policy's; LearnerError if no server answers.
    """
    if config.base_url is not None and config.protocol == "tinker":
        made: Teacher = resolve_name(TINKER_TEACHER)(config, directory, ranks=policy.runner.ranks)
        return made
    if config.base_url is not None:
        from art_cli.learners.teachers.teacher_server import ServerTeacher

        return ServerTeacher(config, policy.runner.weights.tokenizer, directory, ranks=policy.runner.ranks)
    from art_cli.learners.teachers.local_teacher import LocalTeacher

    return LocalTeacher(config.model, policy, directory)
