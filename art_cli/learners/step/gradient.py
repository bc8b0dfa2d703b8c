"""The gradient of one optimizer step: samples in, `.grad` out. Weights do not change.

samples -> packs -> per pack: scores -> loss terms -> loss -> backward
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.algorithms.off_policy import Correction, SampledTerms
from art_cli.learners.algorithms.pack_loss import LossTerms, PackLoss, binary_kl, pack_loss
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.logprob_reader import side_by_side
from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack
from art_cli.learners.samples import COMPONENTS, Floats, Row, Sample, mask_of
from art_cli.learners.step.policy_step import Pass
from art_cli.learners.step.step_samples import count
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.models.device import doubled
from art_cli.runtime.errors import LearnerError

CAUSES = (
    "no weight was changed, and the same command tries the step again. Likely causes: earlier steps moved the weights "
    "too far (go back with art checkpoints --fork, and lower train.learning_rate), that attempt's logprobs, or the "
    "formula of your algorithm"
)


class Update(NamedTuple):
    """One upcoming optimizer step: packs, counts, and the packs' logprobs under the sampling weights."""

    packs: list[Pack]  # this process's packs
    counts: list[UpdateCounts]  # counts for every loss component
    # [N] per pack: the terms' logprobs under the sampling weights; None if the current weights sampled them
    before: Sequence[Tensor | None]
    has_unknown: bool  # whether some policy tokens lack comparable engine logprobs


class _Computed(NamedTuple):
    scores: TokenScores
    terms: LossTerms
    loss: PackLoss


class LossGradient:
    """Computes an algorithm's loss gradient pack by pack.

    `correction` weights tokens sampled by another policy; None disables it. `mean_over` selects the trajectories
    counted in the algorithm's share: those with signal, or all.
    """

    def __init__(
        self,
        runner: PackRunner,
        algorithm: Algorithm,
        *,
        correction: Correction | None = None,
        mean_over: Literal["trained", "all"] = "trained",
    ) -> None:
        self.runner, self.algorithm = runner, algorithm
        self.correction, self.mean_over = correction, mean_over
        self._is_to_engine = correction is None and not algorithm.has_sample_ratio  # the ratios' old probability

    def plan(self, samples: Sequence[Sample], finished: FinishedCounts | None = None) -> Update:
        """Returns the update. `finished` is its part of the step's finished trajectories (default: the samples)."""
        packs, counts = self.runner.deal(samples), count(samples, finished)
        if counts[Row.VALUE].tokens and self.runner.value_head is None:
            raise LearnerError("credit: value targets need a critic, which only loss=ppo has")
        if counts[Row.REFERENCE_KL].tokens and not self.runner.weights.has_adapter:
            raise LearnerError("credit: reference_kl needs a reference, the model without its adapter: set model.lora")
        has_unknown = any(np.isnan(sample.logprobs[~np.isnan(sample.advantages)]).any() for sample in samples)
        return Update(packs, counts, [None] * len(packs), has_unknown)

    def look_ahead(self, update: Update, at: Pass, *, always: bool = False) -> Update:
        """Returns the update with logprobs at the current weights, if later updates need them or `always`."""
        if self._is_to_engine and not update.has_unknown and not always:
            return update
        before: list[Tensor | None] = []
        with torch.no_grad():
            for pack in update.packs:
                scores = self.runner.run(pack)
                at.statistics.add_gap(scores, pack)
                before.append(scores.logprobs[self._tensor(pack.terms.edges)])
                at.heartbeat()
        return update._replace(before=before)

    def accumulate(self, update: Update, at: Pass) -> list[Tensor]:
        """Adds the update's gradient to the parameters' `.grad`. Returns each pack's logprobs at the current weights.

        Raises LearnerError naming a trajectory with a non-finite loss, after all processes have run their packs.
        """
        # at the initial optimizer step, the weights are still the sampling weights
        statistics, is_first = at.statistics, at.number == 0
        statistics.losses.append(0.0)
        faults: list[str] = []
        logprobs: list[Tensor] = []
        for pack, before, found in zip(update.packs, update.before, self._compute(update), strict=True):
            scores, terms, loss = found
            if is_first and before is None:  # otherwise look_ahead has already added it
                statistics.add_gap(scores, pack)
            is_bad = ~loss.parts.isfinite()
            if is_bad.any():
                faults.append(_not_finite("loss", pack.samples[int(terms.samples[is_bad][0])]))
            if not is_first:
                statistics.logprob_change.add((terms.new.detach() - terms.old).abs()[terms.terms_in(Row.POLICY)])
            statistics.add_pack(pack, scores, loss, importance=terms.importance)
            if at.record is not None:
                at.record.add(pack, terms, loss, update=at.number)
            logprobs.append(terms.new.detach())
            at.advance()
        for parameter in [] if self.runner.value_head is None else self.runner.value_head.parameters():
            # every process runs the same number of packs, so gradients exist in all processes or in none
            if parameter.grad is not None:
                self.runner.ranks.add_up(parameter.grad)
        if faults := [fault for of_rank in self.runner.ranks.gather(faults, list[str]) for fault in of_rank]:
            raise LearnerError(faults[0])
        return logprobs

    def _compute(self, update: Update) -> Iterator["_Computed"]:
        """Yields each pack's numbers in order, once its gradient is in `.grad`.

        Packs computed side by side are still added in pack order, so the sum does not depend on the number of cores.
        """
        # the reference policy runs with the adapter disabled, and all threads share the adapter
        has_reference = update.counts[Row.REFERENCE_KL].tokens > 0
        packs = list(zip(update.packs, update.before, strict=True))
        if has_reference or not (self.algorithm.is_pure and self.runner.is_side_by_side(update.packs)):
            for pack, before in packs:
                found = self._lose(update, pack, before)
                found.loss.loss.backward()  # type: ignore[no-untyped-call]
                yield found
            return
        trained = [parameter for parameter in self.runner.model.parameters() if parameter.requires_grad]
        trained += [] if self.runner.value_head is None else self.runner.value_head.parameters()

        def compute(asked: tuple[Pack, Tensor | None]) -> tuple[_Computed, Sequence[Tensor | None]]:
            found = self._lose(update, *asked)
            return found, torch.autograd.grad(found.loss.loss, trained, allow_unused=True)

        for found, gradients in side_by_side(compute, packs):
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            yield found

    def _lose(self, update: Update, pack: Pack, before: Tensor | None) -> "_Computed":
        """Returns the pack's scores, terms and loss, connected by autograd."""
        edges, reference = self._tensor(pack.terms.edges), None
        if update.counts[Row.REFERENCE_KL].tokens:
            with torch.no_grad(), self.runner.weights.adapter_off():
                reference = self.runner.run(pack).logprobs[edges]
        scores = self.runner.run(pack)
        new = scores.logprobs[edges]
        before = new.detach() if before is None else before
        engine = self._tensor(pack.terms.logprobs)
        samples, weights = self._tensor(pack.terms.samples), self._tensor(pack.terms.weights)
        sampled = SampledTerms(new.detach(), before, engine, weights[Row.POLICY], samples)
        terms = LossTerms(
            new=new,
            # Normally the engine's logprobs. The learner's logprobs replace them where the engine's are not comparable,
            # and everywhere if `correction` weights the difference, or if a ratio covers a whole sample.
            old=torch.where(engine.isnan(), before, engine) if self._is_to_engine else before,
            samples=samples,
            weights=weights,
            shares=self._tensor(self._shares(pack.samples, update.counts)[:, pack.terms.samples]),
            importance=None if self.correction is None else self.correction(sampled),
            reference=reference,
            values=None if scores.values is None else scores.values[edges],
        )
        return _Computed(scores, terms, pack_loss(self.algorithm, terms))

    @torch.no_grad()
    def divergence(
        self, update: Update, *, now: Sequence[Tensor] | None = None, heartbeat: Callable[[], None] = lambda: None
    ) -> float:
        """Returns the mean `binary_kl` of policy tokens in nats, from `before` to now; NaN without policy tokens.

        `update.before` must be set. `now` are the packs' present logprobs, if a pass has computed them. The KL is
        infinite if a present logprob is not finite. `heartbeat` is called after every pack.
        """
        sums: Floats = np.zeros(2)
        for index, (pack, of_pack) in enumerate(zip(update.packs, update.before, strict=True)):
            assert of_pack is not None
            is_policy = self._tensor(mask_of(pack.terms.weights, Row.POLICY))
            present = self.runner.run(pack).logprobs[self._tensor(pack.terms.edges)] if now is None else now[index]
            # float64, because float32 rounding exceeds a KL below 1e-7
            values = binary_kl(*doubled(torch.stack((of_pack, present))[:, is_policy]))
            sums += float(values.nan_to_num(nan=math.inf).sum()), len(values)
            heartbeat()
        total, num_tokens = np.sum(self.runner.ranks.gather(sums, Floats), axis=0)
        return float(total / num_tokens) if num_tokens else math.nan

    def blame(self, update: Update, optimizer: Optimizer) -> str:
        """Returns a message naming the sample whose gradient is not finite, by running every sample alone."""
        if self.runner.ranks.size > 1:
            return f"the step's gradient is not finite; {CAUSES}. learner.processes=1 names the attempt"
        for pack, before in zip(update.packs, update.before, strict=True):
            for index, sample in enumerate(pack.samples):
                own = None if before is None else before[self._tensor(pack.terms.samples) == index]
                alone = update._replace(packs=self.runner.deal([sample]), before=[own])
                self.accumulate(alone, Pass(0, StepStatistics()))
                norm = optimizer.clip()
                optimizer.clear()
                if not math.isfinite(norm):
                    return _not_finite("gradient", sample)
        return f"the step's gradient is not finite, though each attempt's alone is; {CAUSES}"

    def _shares(self, samples: Sequence[Sample], counts: Sequence[UpdateCounts]) -> Floats:
        """Returns [4, samples] the factor for a sample's tokens in each component's mean; 0 without tokens."""
        shares = np.zeros((len(COMPONENTS), len(samples)))
        for component in COMPONENTS:
            for index, sample in enumerate(samples):
                if num_tokens := sample.num_in(component):
                    update = counts[component]
                    shares[component, index] = (
                        self.algorithm.value_share(update)
                        if component is Row.VALUE
                        else self.algorithm.share(num_tokens, update.over(self.mean_over))
                    )
        return shares

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Returns the array on the learner's device, numbers as float32, because MPS has no float64."""
        tensor = torch.from_numpy(array)
        return (tensor.float() if tensor.is_floating_point() else tensor).to(self.runner.weights.device)


def _not_finite(what: str, sample: Sample) -> str:
    return f"trajectory {sample.trajectory_id}, turn {sample.turn}: its {what} is not finite; {CAUSES}"
