"""Holds packs against plain rows on samples of the run itself: contract 1 where it counts, once, before the first step.

`PackRunner.settle` finds out on one sequence whether a model can run packs at all. This compares the pack that shares
most, as the step would run it, with the model run as it is on one sample at a time: the logprobs and the gradient.
It changes no weight and decides nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from art_cli.learners.pack_runner import TOLERANCE, PackRunner
from art_cli.learners.packing import Pack
from art_cli.learners.ranks import Ranks
from art_cli.learners.samples import Sample

MAX_SAMPLES = 4  # of the pack: enough to branch, few enough to cost less than the step
MAX_NUMBERS = 1 << 26  # of the gradient that are compared; the smallest tensors first
# Of the gradient's norm. float32: 1e-6 on the test models, where a wrong mask gives 0.1 and up; bfloat16 has 8 bits.
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class PackingGap(NamedTuple):
    """How far packs are from plain rows. Example: PackingGap(2e-7, 1e-6, 128, torch.float32)."""

    logprob: float  # nats, mean over tokens
    gradient: float  # norm of the difference, of the plain gradient's
    num_tokens: int  # whose logprobs were compared
    dtype: torch.dtype  # of the base

    @property
    def is_small(self) -> bool:
        return self.logprob <= TOLERANCE[self.dtype] and self.gradient <= GRADIENT_TOLERANCE[self.dtype]

    def __str__(self) -> str:
        return (
            f"logprobs differ by {self.logprob:.2g} nats in the mean (bound {TOLERANCE[self.dtype]:.2g}), the gradient "
            f"by {self.gradient:.2g} of its norm (bound {GRADIENT_TOLERANCE[self.dtype]:.2g}), {self.num_tokens} tokens"
        )


def compare_packing(runner: PackRunner, samples: Sequence[Sample]) -> PackingGap:
    """The gap on the samples of the pack that shares most; `runner` has settled. Leaves no gradient behind.

    All processes of a learner call it, and run the same: what each gradient is summed over does not change their ratio.
    """
    share = runner.config.packing != "rows"  # also where this batch's trees would not pay: a later one's may
    chosen = max(runner.pack(samples, share=share), key=_shared).samples[:MAX_SAMPLES]
    # the model's own layers keep several times what packs do, and this is not to be a step's peak: one row at a time
    plain = PackRunner(runner.weights, runner.config.model_copy(update={"gradient_checkpointing": True}), runner.ranks)
    plain.can_pack = False
    packed_logprobs, packed_gradient = _measure(runner, runner.pack(chosen, share=share))
    logprobs, gradient = _measure(plain, [pack for sample in chosen for pack in plain.pack([sample])])
    gaps = torch.cat([(packed_logprobs[key] - logprobs[key]).abs() for key in logprobs])
    difference = sum(float((packed_gradient[name] - part).square().sum()) for name, part in gradient.items())
    norm = sum(float(part.square().sum()) for part in gradient.values())
    relative = (difference / norm) ** 0.5 if norm else 0.0
    return PackingGap(float(gaps.mean()), relative, len(gaps), runner.weights.dtype)


def _shared(pack: Pack) -> int:
    """Tokens that the pack computes once for several samples."""
    return sum(len(sample.token_ids) for sample in pack.samples) - len(pack.token_ids)


def _measure(runner: PackRunner, packs: Sequence[Pack]) -> tuple[dict[int, Tensor], Mapping[str, Tensor]]:
    """Logprobs of each trained token of the packs' samples, and the gradient of their sum."""
    logprobs: dict[int, Tensor] = {}
    parameters = dict(runner.weights.model.named_parameters())
    try:
        with runner.running():
            for pack in packs:
                scores = runner.run(pack)
                terms = scores.logprobs[torch.from_numpy(pack.terms.edges).to(scores.logprobs.device)]
                terms.sum().backward()  # type: ignore[no-untyped-call]
                of_samples = torch.from_numpy(pack.terms.samples)
                for index, sample in enumerate(pack.samples):
                    logprobs[id(sample)] = terms.detach().float().cpu()[of_samples == index]
        return logprobs, _copy_gradient(parameters, runner.ranks)
    finally:
        for parameter in parameters.values():
            parameter.grad = None


def _copy_gradient(parameters: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Whole, of MAX_NUMBERS at most, in float32 on the CPU."""
    copied: dict[str, Tensor] = {}
    num_numbers = 0
    for name, parameter in sorted(parameters.items(), key=lambda item: item[1].numel()):
        if parameter.grad is None:
            continue
        num_numbers += parameter.numel()
        if copied and num_numbers > MAX_NUMBERS:
            break
        copied[name] = ranks.whole(parameter.grad).float().cpu()
    return copied
