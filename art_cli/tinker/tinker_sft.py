"""RemoteSft: a supervised warm-up on a server of the Tinker protocol, by its cross_entropy, which any such server has.

The batches, the loss and the settings are those of sft_trainer.py. It reads and writes `sft/` in a checkpoint
directory, whose weights and optimizer are the server's.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.config.schema import SftConfig
from art_cli.learners import SFT_DIRECTORY, SftProgress
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.samples import Sample
from art_cli.learners.schedule import clip_limit, rate_of_step, warm_up_settings
from art_cli.learners.sft.examples import example_samples
from art_cli.learners.sft.sft_batches import plan_batches
from art_cli.learners.sft.sft_sums import Sums
from art_cli.runtime.errors import CheckpointError, LearnerError, one_line
from art_cli.tinker.tinker_data import logprobs_of
from art_cli.tinker.tinker_losses import WeightedSample, weigh
from art_cli.tinker.tinker_trainer import RemoteTrainer

SUMS_FILE = "sums.json"
AHEAD = 3  # number of updates that are sent before the first of them is answered: small ones need more than large ones


class RemoteSums(Sums):
    """sft/sums.json of a warm-up on a server."""

    best: str | None = None  # the server's path of the weights of the lowest evaluation loss; None: not kept


class _Sent(NamedTuple):
    update: list[WeightedSample]
    answer: Any  # future of the pass
    applied: Any  # future of the optimizer step


class RemoteSft:
    """One supervised warm-up, from its first optimizer step to its last. `sft.Sft` says what its numbers are."""

    def __init__(
        self,
        trainer: RemoteTrainer,
        examples: Sequence[dict[str, Any]],
        evaluated: Sequence[dict[str, Any]],
        config: SftConfig,
        *,
        seed: int,
        tokenizer: Any,
        limits: Mapping[str, int],
    ) -> None:
        """`limits` are max_length and vocabulary of the model. Raises LearnerError: no examples, or a bad one."""
        self.trainer, self.config, self.sums = trainer, config, RemoteSums()
        self.batches = plan_batches(
            [_samples(each, tokenizer, f"demo {number}", limits) for number, each in enumerate(examples, 1)],
            config,
            seed=seed,
        )
        self.evaluated = [
            sample
            for number, each in enumerate(evaluated, 1)
            for sample in _samples(each, tokenizer, f"evaluation demo {number}", limits)
        ]
        self.settings = warm_up_settings(config, self.batches.num_updates)
        self.eval_every = config.eval_every or self.batches.epoch_updates

    def take(self, num_updates: int) -> SftProgress:
        """Takes the next `num_updates` optimizer steps, or as many as are left.

        Raises LearnerError: an evaluation loss that is not finite.
        """
        if self.sums.num_updates == 0 and not self.sums.evaluations:
            self._begin()
        end = min(self.sums.num_updates + num_updates, self.batches.num_updates)
        while self.sums.num_updates < end and not self.is_done:
            due = end
            if self.evaluated:
                due = min(end, (self.sums.num_updates // self.eval_every + 1) * self.eval_every)
            self._take_until(due)
            if self.evaluated and (due % self.eval_every == 0 or due >= self.batches.num_updates):
                self._evaluate()
        if self.is_done and self.sums.best is not None:
            self.trainer.restart_from(self.sums.best)
        numbers = self.sums.numbers(
            epoch_updates=self.batches.epoch_updates, patience=self.config.patience, is_done=self.is_done
        )
        return SftProgress(num_updates=self.sums.num_updates, is_done=self.is_done, numbers=numbers)

    @property
    def is_done(self) -> bool:
        return self.sums.is_done(self.batches.num_updates, patience=self.config.patience)

    def save(self, directory: Path) -> None:
        place = directory / SFT_DIRECTORY
        place.mkdir(exist_ok=True)
        (place / SUMS_FILE).write_bytes(msgspec.json.encode(self.sums))

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote. Raises CheckpointError: unreadable."""
        place = directory / SFT_DIRECTORY / SUMS_FILE
        try:
            self.sums = msgspec.json.decode(place.read_bytes(), type=RemoteSums)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{place}: {one_line(error)}") from None

    # --- its updates and evaluations ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins with an optimizer of its own, where the weights were trained before."""
        if self.trainer.saved is not None:
            self.trainer.restart_from(self.trainer.saved.state)
        if self.evaluated:
            self._evaluate()

    def _take_until(self, end: int) -> None:
        """Takes the optimizer steps before that index."""
        waiting: deque[_Sent] = deque()
        begin = time.perf_counter()
        for index in range(self.sums.num_updates, end):
            waiting.append(self._send(index))
            while len(waiting) == AHEAD or (waiting and index == end - 1):
                self._finish(waiting.popleft(), time.perf_counter() - begin)
                begin = time.perf_counter()

    def _send(self, index: int) -> _Sent:
        """Has the server take the optimizer step with that index."""
        update = weigh(self.batches.batch(index), Algorithm(), None, mean_over="trained")
        data = [self.trainer.datum(each.sample, weights=each.imitation) for each in update]
        answer = self.trainer.client.forward_backward(data, "cross_entropy")
        limit = clip_limit(self.settings, ())
        rate = rate_of_step(self.settings, index + 1)  # sft.Sft counts a step before it takes it
        applied = self.trainer.submit_update(self.settings, rate, limit)
        return _Sent(update, answer, applied)

    def _finish(self, sent: _Sent, seconds: float) -> None:
        samples = [each.sample for each in sent.update]
        logprobs = logprobs_of(self.trainer.wait(sent.answer, "forward_backward"), samples)
        norm = self.trainer.wait_for_update(sent.applied)
        pairs = zip(sent.update, logprobs, strict=True)
        self.sums.add_update(
            -math.fsum(float(value) for each, new in pairs for value in each.imitation * new),
            norm,
            trained=sum(len(sample.targets) for sample in samples),
            computed=sum(len(sample.token_ids) for sample in samples),
            epoch_updates=self.batches.epoch_updates,
            seconds=seconds,
        )

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        logprobs = self.trainer.forward(self.evaluated)
        loss = -math.fsum(float(row.sum()) for row in logprobs) / sum(map(len, logprobs))
        if not math.isfinite(loss):
            raise LearnerError(
                f"sft: the evaluation loss after update {self.sums.num_updates} is {loss}; lower sft.learning_rate"
            )
        is_best = self.sums.add_evaluation(loss, seconds=time.perf_counter() - begin)
        if self.config.patience is not None and is_best:
            self.sums.best = self.trainer.save_state()


def _samples(example: dict[str, Any], tokenizer: Any, name: str, limits: Mapping[str, int]) -> list[Sample]:
    """Raises LearnerError: an example that cannot be trained on."""
    samples = example_samples(
        example, tokenizer, name=name, max_length=limits["max_length"], vocabulary=limits["vocabulary"]
    )
    for sample in samples:
        if (sample.temperatures != 1).any():
            raise LearnerError(
                f"{sample.trajectory_id}: sampled at another temperature than 1, and a server of the Tinker protocol "
                "computes logprobs at 1 only; leave it out"
            )
    return samples
