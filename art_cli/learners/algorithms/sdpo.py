"""SDPO, an experiment: the policy given the judge's explanation teaches the policy without the explanation.

Feedback rebuilds an attempt's samples with the judge's explanation in the initial user message.

    sample         <system> <user: the task> <assistant: y1> <user: more> <assistant: y2>
    with feedback  <system> <user: the task, and the explanation> <assistant: y1> <user: more> <assistant: y2>

The chat template renders only the head, with and without the explanation. The difference is spliced into the recorded
tokens, which otherwise stay unchanged. So y1 and y2 are the sampled ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from art_cli.chat.control_tokens import ControlTokens
from art_cli.chat.requests import prompt_text
from art_cli.config.sections.base_config import Float
from art_cli.config.sections.loss_config import TaughtLossConfig
from art_cli.learners.algorithms.distillation import Lesson, TaughtPreset, sampled_tokens, student_logprobs
from art_cli.learners.samples import Ints, Sample, common_prefix
from art_cli.runs.trajectory import Json, ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.learners.algorithms.moving_average import MovingAverage
    from art_cli.learners.packs.logprob_reader import Reader

# The text follows SDPO's template (appendix of arXiv:2601.20802), with score and rank added.
TEMPLATE = """

The following is feedback on your earlier attempt, which was given {score} of 1 (rank {rank} of {attempts}):

{explanation}

Correctly solve the original task."""


class Splice(NamedTuple):
    """Replaces the tokens from `start` to the end of `head`, in sequences that begin with `head`.

    Example: Splice(head=[1, 2, 3], start=2, put=[8, 9]) turns 1 2 3 4 5 into 1 2 8 9 4 5.
    """

    head: Ints
    start: int
    put: Ints

    def apply(self, sample: Sample) -> Sample | None:
        """Returns the spliced sample; None when the sample has a different head or a target inside the head."""
        end = len(self.head)
        if not np.array_equal(sample.token_ids[:end], self.head) or (sample.targets < end).any():
            return None
        token_ids = np.concatenate([sample.token_ids[: self.start], self.put, sample.token_ids[end:]])
        return replace(sample, token_ids=token_ids, targets=sample.targets + len(token_ids) - len(sample.token_ids))


class Feedback:
    """Builds splices with one tokenizer. `template` has {explanation}, {score}, {rank} and {attempts} placeholders."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._controls, self._template = ControlTokens(tokenizer), TEMPLATE if template is None else template

    def words(self, trajectory: ScoredTrajectory, group: Sequence[ScoredTrajectory]) -> str | None:
        """Returns the template filled with the judge's explanation; None without an explanation."""
        said = [score.explanation for score in trajectory.scores if score.explanation]
        if not said or trajectory.reward is None:
            return None
        better = sum(other.reward is not None and other.reward > trajectory.reward for other in group)
        values = {"score": f"{trajectory.reward:.2f}", "rank": str(better + 1), "attempts": str(len(group))}
        text = self._template
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        # last, because the explanation itself may contain {score}
        return text.replace("{explanation}", "\n".join(said))

    def insert(
        self, trajectory: ScoredTrajectory, samples: Sequence[Sample], group: Sequence[ScoredTrajectory]
    ) -> list[Sample] | None:
        """Returns the attempt's samples with the judge's explanation in the initial user message.

        Returns None without an explanation, or if a sample does not begin with the head of any conversation.
        """
        words = self.words(trajectory, group)
        if words is None:
            return None
        conversations = (trajectory.messages, *trajectory.branches)
        splices = [splice for each in conversations if (splice := self._splice(each, trajectory.tools, words))]
        found = [next((made for splice in splices if (made := splice.apply(sample))), None) for sample in samples]
        return [made for made in found if made is not None] if None not in found else None

    def _splice(self, messages: Sequence[Json], tools: Sequence[Json], words: str) -> Splice | None:
        """Returns the splice; None when the user message is missing or the template rejects the conversation."""
        first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None:
            return None
        head = messages[: first + 1]
        longer = [*head[:-1], {**head[-1], "content": prompt_text(head[-1].get("content")) + words}]
        try:
            return _difference(self._render(head, tools), self._render(longer, tools))
        except Exception:  # boundary to the model's chat template, which may fail in any way
            return None

    def _render(self, messages: Sequence[Json], tools: Sequence[Json]) -> Ints:
        return np.asarray(self._controls.chat_ids(messages, tools), dtype=np.int64)


def _difference(old: Ints, new: Ints) -> Splice:
    """Returns the smallest replacement that turns `old` into `new`."""
    start = common_prefix(old, new)
    tail = common_prefix(old[start:][::-1], new[start:][::-1])
    return Splice(old[: len(old) - tail], start, new[start : len(new) - tail])


class SdpoConfig(TaughtLossConfig):
    """SDPO (2026, arXiv:2601.20802): the policy with the judge's explanation teaches the policy without it."""

    needs_explanations: ClassVar[bool] = True

    name: Literal["sdpo"]
    teacher_rate: Annotated[Float, Field(gt=0, le=1)] = 0.05
    """The teacher is a moving average of the policy: after each step it moves by this share toward the policy's
    weights. 1: the teacher is the policy."""
    feedback: str | None = None
    """The text added to the first user message, with the judge's {explanation}, {score}, {rank} and {attempts}. null:
    the text in docs/teachers.md."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if self.feedback is not None and "{explanation}" not in self.feedback:
            yield "feedback", "has no {explanation}, so the policy would not read the judge's words"


class Sdpo(TaughtPreset[SdpoConfig]):
    """SDPO: self-distillation policy optimization, 2026 (arXiv:2601.20802), on sampled tokens, with a judge's words.

    A_t = log q(y_t | x, feedback, y_<t) - log p(y_t | x, y_<t), detached, where p is the sampling policy and q, the
    teacher, is the policy's moving average over past steps. The feedback is the judge's explanation for this attempt,
    with score and rank, in the initial user message; the paper uses a successful attempt or an environment's message.
    There is no lesson for attempts without an explanation or whose longer prompt would exceed the context.
    """

    section = SdpoConfig
    _feedback: "Feedback"
    teacher: "MovingAverage"  # set by `bind`

    def bind(self, policy: "Reader", directory: Path) -> None:
        from art_cli.learners.algorithms.moving_average import MovingAverage

        super().bind(policy, directory)
        self._feedback = Feedback(policy.runner.weights.tokenizer, self.knobs.feedback)
        self.teacher = MovingAverage(policy.runner, self.knobs.teacher_rate)

    def after_step(self) -> None:
        self.teacher.follow()

    def save(self, directory: Path) -> None:
        self.teacher.save(directory)

    def load(self, directory: Path) -> None:
        self.teacher.load(directory)

    def lessons(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, Lesson]:
        most = self._policy.runner.weights.max_length
        found = []
        for group in groups:
            for trajectory in group:
                samples = sampled_tokens(trajectory)
                told = self._feedback.insert(trajectory, samples, group)
                if samples and told is not None and all(len(each.token_ids) <= most for each in told):
                    found.append((trajectory, samples, told))
        students = iter(
            student_logprobs([sample for _, samples, _ in found for sample in samples], self._policy.logprobs)
        )
        with self.teacher.installed():
            teachers = iter(self._policy.logprobs([sample for _, _, told in found for sample in told]))
        return {
            trajectory.id: self._lesson(trajectory, samples, [next(teachers) - next(students) for _ in samples])
            for trajectory, samples, _ in found
        }
