"""The configurable algorithms: presets by name (`loss=dapo`), or a class in the user's file.

To add an experiment, write one file like gigpo.py containing its config section and algorithm (citing paper and
equation), and add a line to EXPERIMENTS in config/sections/loss_config.py. tests/learners/test_presets.py then checks
its gradient and resume. PRESETS are established algorithms, with sections in loss_config.py.

UserAlgorithm calls the user's class and checks the answers; its errors name file and line.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.config.sections import loss_config
from art_cli.learners import StepMetrics
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.distillation import Distill
from art_cli.learners.algorithms.grpo import Cispo, Dapo, DrGrpo, Grpo, Gspo, Rloo
from art_cli.learners.algorithms.normalization import UpdateCounts
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms
from art_cli.learners.algorithms.ppo import Ppo
from art_cli.learners.algorithms.preset import Preset
from art_cli.learners.samples import Credit
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError, UsageError, describe
from art_cli.runtime.plugins import place_of, resolve

if TYPE_CHECKING:
    from art_cli.learners.packs.logprob_reader import Reader


PRESETS: dict[str, type[Preset[Any]]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "distill": Distill,
    "ppo": Ppo,
}


class UserAlgorithm(Algorithm):
    """Calls the user's class. Raises LearnerError if a method raises or returns an unusable value."""

    # the user's class may keep the policy, and is called for one pack at a time
    is_pure, reads_policy = False, True

    def __init__(self, entry: str, options: Mapping[str, Any], directory: Path) -> None:
        """Raises UsageError if `entry` cannot be loaded, is not an Algorithm, or does not accept `options`."""
        self._entry, self._root = entry, directory.resolve()
        kind = resolve(entry, base=directory)
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise UsageError(f"{entry}: not a class that extends art_cli.learners.algorithms.Algorithm")
        try:
            self._own = kind(**options)
        except Exception as error:  # the boundary to the user's class
            raise UsageError(f"{entry}: {self._described(error)}") from error
        self.is_scaled, self.compares_states = bool(self._own.is_scaled), bool(self._own.compares_states)
        self.compares_groups = bool(self._own.compares_groups)
        self.has_sample_ratio = bool(self._own.has_sample_ratio)
        self._numbers: dict[str, float] = {}

    def numbers(self) -> dict[str, float]:
        return self._numbers

    def bind(self, policy: "Reader", directory: Path) -> None:
        with self._calling("bind"):
            self._own.bind(policy, directory)

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        method = "credit" if type(self._own).credit_step is Algorithm.credit_step else "credit_step"
        with self._calling(method):
            answer = [list(credits) for credits in self._own.credit_step(groups)]
        if len(answer) != len(groups):
            raise LearnerError(f"{self._entry}: {method} gave {len(answer)} lists for {len(groups)} groups")
        for group, credits in zip(groups, answer, strict=True):
            if len(credits) != len(group):
                raise LearnerError(f"{self._entry}: {method} gave {len(credits)} values for {len(group)} trajectories")
        with self._calling("numbers"):
            numbers = dict(self._own.numbers())
        if unknown := sorted(numbers.keys() - set(StepMetrics.__struct_fields__)):
            raise LearnerError(f"{self._entry}: numbers gave {unknown[0]!r:.60}, which StepMetrics does not have")
        # checked here, while the step can still be canceled
        self._numbers = {name: self._number("numbers", value) for name, value in numbers.items()}
        return [[self._credit(method, value) for value in credits] for credits in answer]

    def after_step(self) -> None:
        with self._calling("after_step"):
            self._own.after_step()

    def save(self, directory: Path) -> None:
        with self._calling("save"):
            self._own.save(directory)

    def load(self, directory: Path) -> None:
        with self._calling("load"):
            self._own.load(directory)

    def objective(self, terms: PolicyTerms) -> Objective:
        from torch import Tensor

        with self._calling("objective"):
            answer = self._own.objective(terms)
        if not isinstance(answer, Objective) or not isinstance(answer.values, Tensor):
            raise LearnerError(f"{self._entry}: objective must return an Objective, not {type(answer).__name__}")
        for name, tensor in answer._asdict().items():
            if tensor is not None and tensor.shape != terms.new.shape:
                shapes = f"{list(tensor.shape)}, and there are {len(terms.new)} terms"
                raise LearnerError(f"{self._entry}: objective's {name} have the shape {shapes}")
        return answer

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        with self._calling("share"):
            answer = self._own.share(num_tokens, update)
        return self._number("share", answer)

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to the user's class
            raise LearnerError(f"{self._entry}: {method}: {self._described(error)}") from error

    def _described(self, error: Exception) -> str:
        place = place_of(error, self._root)
        return describe(error) + (f" ({place})" if place else "")

    def _credit(self, method: str, value: object) -> Credit | float | None:
        return value if value is None or isinstance(value, Credit) else self._number(method, value)

    def _number(self, method: str, value: object) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise LearnerError(f"{self._entry}: {method} gave {value!r:.60}, not a finite number")
        return float(value)


def build_algorithm(
    config: loss_config.LossConfig | loss_config.AlgorithmConfig, *, max_tokens: int, directory: Path = Path()
) -> Algorithm:
    """Returns the configured algorithm. `max_tokens` is the maximum reply length.

    Raises UsageError if a user's class, whose file path is relative to `directory`, cannot be loaded.
    """
    if isinstance(config, loss_config.AlgorithmConfig):
        return UserAlgorithm(config.entry, config.options, directory)
    preset = PRESETS.get(config.name) or resolve(loss_config.EXPERIMENTS[config.name], base=directory)
    return preset(config, max_tokens)
