"""Compares packs with plain rows, on a probe and on a run's initial batch, and makes the runner use what works.

The probe is one sequence plus a branch. It tests whether a model can run packs at all. The initial batch tests contract
1 where it matters: the pack with the most sharing, as the step would run it, against the unmodified model on one sample
at a time, in logprobs and gradient. Weights do not change.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack, pack_samples
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.samples import Ints, Sample, bare_sample
from art_cli.models.decoder.forward import Gap, bound_of, rounded_otherwise

log = logging.getLogger(__name__)

TAIL = 64  # number of a probe's last tokens, and of a batch's tokens before the first sampled token, that are compared
MAX_SAMPLES = 4  # samples compared from the initial batch: enough to branch, yet cheaper than the step
MAX_NUMBERS = 1 << 26  # compared gradient numbers; the smallest tensors come before larger ones


class PackingCheck:
    """Decides for one runner. All learner processes call it and run the same passes."""

    def __init__(self, runner: PackRunner) -> None:
        self.runner = runner
        self.has_compared = False  # whether a batch was compared

    def probe(self, sample: Sample) -> None:
        """Decides whether the runner packs. Later calls do nothing."""
        if self.runner.can_pack is not None:
            return
        packing, name = self.runner.using_packs(True), type(self.runner.model).__name__
        packs = pack_samples(_probes(sample.token_ids), budget=2 * len(sample.token_ids))
        try:
            with torch.no_grad():
                gap = _compare(packing, packs)
        except (NotImplementedError, TypeError) as error:
            self.runner.decide(False, f"{name} cannot run packs ({error})")
            return
        self._decide(
            gap,
            f"{name} cannot run packs (packed and plain logprobs differ by {gap.found.logprob:.2g} nats "
            f"on average, over {gap.bound.logprob:.2g})",
        )

    def compare(self, batch: Sequence[Sample]) -> None:
        """Compares packs with plain rows on the initial batch; if they differ, the runner uses rows from then on."""
        if self.has_compared or not self.runner.can_pack:
            return
        self.has_compared = True
        gap = compare_batch(self.runner, batch)
        self._decide(gap, f"packs do not hold against plain rows: {gap}")
        if self.runner.can_pack:
            log.debug("packs hold against plain rows: %s", gap)

    def _decide(self, gap: "PackingGap", reason: str) -> None:
        self.runner.decide(all(self.runner.ranks.gather(gap.is_small, bool)), reason)


class PackingGap(NamedTuple):
    """Difference between packs and plain rows. Example: PackingGap(Gap(2e-7, 1e-6), Gap(1e-4, 1e-3), 128)."""

    found: Gap  # logprob: mean over tokens
    bound: Gap
    num_tokens: int  # number of tokens whose logprobs were compared

    @property
    def is_small(self) -> bool:
        return self.found.is_within(self.bound)

    def __str__(self) -> str:
        return (
            f"logprobs differ by {self.found.logprob:.2g} nats in the mean (bound {self.bound.logprob:.2g}), the "
            f"gradient by {self.found.gradient:.2g} of its norm (bound {self.bound.gradient:.2g}), "
            f"{self.num_tokens} tokens"
        )


def compare_batch(runner: PackRunner, batch: Sequence[Sample]) -> PackingGap:
    """Returns the gap for samples from the pack with the most sharing. Gradients are cleared.

    Prompt tokens are compared too. A policy may be so sure of its own tokens that their gradient is rounding alone.
    """
    # also if trees do not pay off for this batch, because they may for later batches
    share = runner.config.packing != "rows"
    pack = max(runner.pack(batch, share=share), key=_shared)
    return _compare(runner, runner.pack([_with_prompt(each) for each in pack.samples[:MAX_SAMPLES]], share=share))


def _compare(runner: PackRunner, packs: Sequence[Pack]) -> PackingGap:
    """Returns the gap between packs and their samples' plain rows; includes gradients where autograd records."""
    plain = runner.using_packs(False)
    rows = [row for pack in packs for sample in pack.samples for row in plain.pack([sample])]
    packed = _measure(runner, packs)
    own = _measure(plain, rows)

    def rounding() -> Gap:
        with rounded_otherwise(plain.model, plain.weights.dtype):
            return _gap(_measure(plain, rows), own)

    gap = _gap(packed, own)
    bound = bound_of(runner.weights.dtype, max(runner.ranks.gather(gap, Gap)), rounding)
    return PackingGap(gap, bound, sum(map(len, own.logprobs.values())))


class _Numbers(NamedTuple):
    logprobs: dict[int, Tensor]  # sample id -> logprobs for its trained tokens
    gradient: Mapping[str, Tensor]  # parameter name -> gradient of the logprob sum


def _gap(found: _Numbers, own: _Numbers) -> Gap:
    gaps = torch.cat([(found.logprobs[key] - own.logprobs[key]).abs() for key in own.logprobs])
    difference = sum(float((found.gradient[name] - part).square().sum()) for name, part in own.gradient.items())
    norm = sum(float(part.square().sum()) for part in own.gradient.values())
    return Gap(float(gaps.mean()), (difference / norm) ** 0.5 if norm else 0.0)


def _with_prompt(sample: Sample) -> Sample:
    """Returns a sample whose targets also include the TAIL tokens before its first target."""
    first = int(sample.targets[0])
    prompt = np.arange(max(1, first - TAIL), first)
    whole = bare_sample(sample.token_ids, np.concatenate([prompt, sample.targets]), sample.trajectory_id)
    return replace(whole, temperatures=np.concatenate([np.ones(len(prompt)), sample.temperatures]))


def _shared(pack: Pack) -> int:
    """Returns the number of tokens saved by sharing."""
    return sum(len(sample.token_ids) for sample in pack.samples) - len(pack.token_ids)


def _probes(token_ids: Ints) -> list[Sample]:
    """Returns the sequence and a copy that branches off in the middle; their last tokens are targets."""
    half = len(token_ids) // 2
    other = np.concatenate([token_ids[:half], token_ids[half:][::-1]])
    targets = np.arange(max(1, len(token_ids) - TAIL), len(token_ids))
    return [bare_sample(ids, targets, name) for ids, name in ((token_ids, "probe"), (other, "probe, turned"))]


def _measure(runner: PackRunner, packs: Sequence[Pack]) -> _Numbers:
    logprobs: dict[int, Tensor] = {}
    parameters = dict(runner.weights.model.named_parameters())
    try:
        with runner.running():
            for pack in packs:
                scores = runner.run(pack)
                terms = scores.logprobs[torch.from_numpy(pack.terms.edges).to(scores.logprobs.device)]
                if torch.is_grad_enabled():
                    terms.sum().backward()  # type: ignore[no-untyped-call]
                of_samples = torch.from_numpy(pack.terms.samples)
                for index, sample in enumerate(pack.samples):
                    logprobs[id(sample)] = terms.detach().cpu().double()[of_samples == index]
        return _Numbers(logprobs, _copy_gradient(parameters, runner.ranks))
    finally:
        for parameter in parameters.values():
            parameter.grad = None


def _copy_gradient(parameters: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Copies whole tensors, up to MAX_NUMBERS numbers, to float32 on the CPU."""
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
