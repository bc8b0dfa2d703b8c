"""RemoteSft: a supervised warm-up on a server of the Tinker protocol, by its cross_entropy, which any such server has.

Weights and optimizer are the server's; `sft/` in a checkpoint directory holds the sums and the path of what is kept.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from art_cli.config.schema import SftConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.samples import Sample
from art_cli.learners.schedule import clip_limit, rate_of_step, warm_up_settings
from art_cli.learners.sft.examples import example_samples
from art_cli.learners.sft.sft_batches import plan_batches
from art_cli.learners.sft.sft_trainer import Sft, Taken
from art_cli.runtime.errors import LearnerError
from art_cli.tinker.tinker_losses import WeightedSample, weigh
from art_cli.tinker.tinker_trainer import RemoteTrainer, logprobs_of


class _Sent(NamedTuple):
    update: list[WeightedSample]
    answer: Any  # future of the pass
    applied: Any  # future of the optimizer step


class RemoteSft(Sft):
    ahead = 3  # small updates need more than large ones, so that the server never waits

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
        """`limits` are max_length and vocabulary. Raises LearnerError if there is no example, or a bad one."""
        given = [_samples(each, tokenizer, f"demo {number}", limits) for number, each in enumerate(examples, 1)]
        held_out = [
            sample
            for number, each in enumerate(evaluated, 1)
            for sample in _samples(each, tokenizer, f"evaluation demo {number}", limits)
        ]
        super().__init__(plan_batches(given, config, seed=seed), held_out, config)
        self.trainer, self.sums.best = trainer, None
        self.settings = warm_up_settings(config, self.batches.num_updates)

    def _begin(self) -> None:
        """Begins with a new optimizer, if the weights were trained before."""
        if self.trainer.saved is not None:
            self.trainer.restart_from(self.trainer.saved.state)

    def _send(self, samples: Sequence[Sample], index: int) -> _Sent:
        update = weigh(samples, Algorithm(), None, mean_over="trained")
        data = [self.trainer.datum(each.sample, weights=each.imitation) for each in update]
        answer = self.trainer.client.forward_backward(data, "cross_entropy")
        rate = rate_of_step(self.settings, index + 1)  # TorchSft counts a step before it takes it
        return _Sent(update, answer, self.trainer.submit_update(self.settings, rate, clip_limit(self.settings, ())))

    def _finish(self, sent: _Sent) -> Taken:
        samples = [each.sample for each in sent.update]
        logprobs = logprobs_of(self.trainer.wait(sent.answer, "forward_backward"), samples)
        norm = self.trainer.wait_for_update(sent.applied)
        pairs = zip(sent.update, logprobs, strict=True)
        return Taken(
            -math.fsum(float(value) for each, new in pairs for value in each.imitation * new),
            norm,
            num_trained=sum(len(sample.targets) for sample in samples),
            num_computed=sum(len(sample.token_ids) for sample in samples),
        )

    def _mean_loss(self, samples: Sequence[Sample]) -> float:
        logprobs = self.trainer.forward(samples)
        return -math.fsum(float(row.sum()) for row in logprobs) / sum(map(len, logprobs))

    def _keep(self) -> None:
        self.sums.best = self.trainer.save_state()

    def _put_back(self) -> None:
        if isinstance(self.sums.best, str):
            self.trainer.restart_from(self.sums.best)


def _samples(example: dict[str, Any], tokenizer: Any, name: str, limits: Mapping[str, int]) -> list[Sample]:
    """Raises LearnerError if the example cannot be trained on."""
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
