"""AdapterLearner: one adapter that a client trains call by call: gradients add up until the client asks for an update.

    data, loss -> packs -> logprobs -> values of the loss -> backward, into `.grad` ... -> AdamW

It has no algorithm, schedule or loop, which are the client's. Several adapters may stand on one base, each
with a learner; the caller runs one of them at a time. A call that fails leaves weights, gradients and optimizer as they
were before it.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.config.schema import BaseLearnerConfig, TrainConfig
from art_cli.learners import Progress
from art_cli.learners.optimizer import Adam, Optimizer
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.probe import measure_probe
from art_cli.learners.samples import Floats, Sample, bare_sample
from art_cli.models.saved_weights import load_checkpoint, save_weights
from art_cli.models.weights import Weights, clone_trainable
from art_cli.runs.manifest import Probe
from art_cli.runtime.allocator import is_out_of_memory
from art_cli.runtime.errors import LearnerError, OutOfMemory
from art_cli.tinker.server.datums import (
    SHARES,
    TOKEN_LOSSES,
    Datum,
    DatumPack,
    TokenLoss,
    ask_for_targets,
    datum_samples,
)


class Passed(NamedTuple):
    """The result of one pass over the data."""

    logprobs: list[Floats]  # [n, K] of each datum's targets; 0 in rows that are not computed
    loss: float  # the sum over all tokens
    num_tokens: int
    clip_fraction: float | None  # share of the tokens that the loss clipped, or None if it does not clip


class _Part(NamedTuple):
    """One process's part of a pass."""

    logprobs: dict[int, Floats]  # each is filed by the index of its datum
    loss: float
    num_tokens: int
    num_clipped: int | None  # None if the loss does not clip or no pack ran here


class AdapterLearner:
    """Trains the adapter of `weights`, or all of them where they have none.

    Failures raise LearnerError or CheckpointError.
    """

    def __init__(self, weights: Weights, config: BaseLearnerConfig, *, ranks: Ranks | None = None) -> None:
        """`ranks` are the processes that share each pass and make the same calls, or None if this one is alone."""
        self.weights = weights
        self.ranks = ranks or Ranks()
        self.runner = PackRunner(weights, config, self.ranks)
        self.packing = PackingCheck(self.runner)
        self.parameters = {name: p for name, p in weights.model.named_parameters() if p.requires_grad}
        device = torch.device("cpu") if config.offload_optimizer else None
        self.optimizer = Optimizer(self.parameters, TrainConfig(learning_rate=1e-4), device=device)

    @property
    def num_updates(self) -> int:
        return self.optimizer.counts.num_updates

    @property
    def rank(self) -> int:
        """The adapter's rank; 0: there is none, and all weights are trained."""
        return int(self.weights.model.peft_config["default"].r) if self.weights.has_adapter else 0

    def close(self) -> None:
        """Does nothing, because there is no other process."""

    def run(
        self,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool,
        progress: Progress | None = None,
    ) -> Passed:
        """Returns the logprobs of the data's targets and the sum of the loss; with `backward` its gradient is added up.

        Raises LearnerError if a loss or a gradient is not finite, or memory runs out; then no gradient was added.
        """
        samples = datum_samples(data)
        if backward:
            self.optimizer.reserve()
        with self._running(samples, compares=backward):
            kept = {name: parameter.grad for name, parameter in self.parameters.items()}
            try:
                for parameter in self.parameters.values():
                    parameter.grad = None
                with torch.set_grad_enabled(backward):
                    passed = self._run(samples, data, TOKEN_LOSSES[loss], settings, backward, progress)
            except BaseException:
                for name, parameter in self.parameters.items():
                    parameter.grad = kept[name]
                raise
            for name, parameter in self.parameters.items():
                before = kept[name]
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        return passed

    def update(self, adam: Adam, *, max_norm: float) -> float:
        """Takes one step of AdamW on the gradients so far and drops them. Returns their norm before clipping.

        `max_norm` 0 does not clip them. Raises LearnerError if they are not finite; no weight was changed.
        """
        with self.weights.lock:
            try:
                norm = self.optimizer.clip(max_norm if max_norm > 0 else math.inf)
                if not math.isfinite(norm):
                    raise LearnerError("the gradient is not finite; no weight was changed, and it was dropped")
                self.optimizer.update(adam)
            finally:
                self.optimizer.clear()
                self.weights.version += 1
        return norm

    def clear(self) -> None:
        """Drops the gradients."""
        self.optimizer.clear()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of each token after the first."""
        ids = np.asarray(token_ids, dtype=np.int64)
        sample = bare_sample(ids, np.arange(1, len(ids)), "probe")
        with self._running([sample], compares=False), torch.no_grad():
            [pack] = self.runner.pack([sample])
            scores: list[float] = self.runner.run(pack).logprobs[pack.terms.edges].tolist()
        return scores

    def measure(self, before: Probe | None = None) -> Probe:
        """Returns a probe of the weights as they are now, on the text of `before`, an earlier one of the same base."""
        return measure_probe(self.weights, self.score, before)

    def copy_weights(self) -> Weights:
        """Returns the policy as it is now; later updates do not reach it."""
        return clone_trainable(self.weights)

    def save(self, directory: Path, *, optimizer: bool) -> None:
        """Writes adapter and tokenizer, and the optimizer's state if it is wanted. The first process writes."""
        with self.weights.lock:
            if self.ranks.rank == 0:
                save_weights(self.weights, directory)
                if optimizer:
                    self.optimizer.save(directory)
            self.ranks.gather(True, bool)  # the others change no weight before it is written

    def load(self, directory: Path, *, optimizer: bool) -> int:
        """Continues from what `save` wrote; without `optimizer` with a new optimizer. Drops the gradients.

        Returns the number of updates that the adapter has taken.
        """
        with self.weights.lock:
            load_checkpoint(self.weights, directory)
            self.optimizer.clear()
            if optimizer:
                self.optimizer.load(directory)
            else:
                self.optimizer.reset()
        return self.num_updates

    def _run(
        self,
        samples: list[Sample],
        data: Sequence[Datum],
        loss: TokenLoss,
        settings: Mapping[str, float],
        back: bool,
        progress: Progress | None,
    ) -> Passed:
        found: dict[int, Floats] = {}
        total, num_tokens, num_clipped, clips, fault = 0.0, 0, 0, False, ""
        packs = self.runner.deal(samples)
        for num_done, made in enumerate(packs, 1):
            if not made.samples:
                continue  # a pass that only other processes have work in
            asked = ask_for_targets(made, data)
            new = self.runner.run(asked.pack).logprobs[self._tensor(asked.edge_of)]
            numbers = self._numbers(asked, data, loss, settings)
            objective = loss.values(new, numbers, self._tensor(asked.datum_of))
            values = objective.values * numbers[SHARES] if SHARES in numbers else objective.values
            is_bad = ~values.detach().isfinite()
            if is_bad.any():
                number = asked.datum_of[int(is_bad.nonzero()[0, 0])]
                fault = f"data[{number}]: its loss is not finite; no gradient was added"
                break
            value = values.sum()
            if back:
                value.backward()  # type: ignore[no-untyped-call]
            total, num_tokens = total + float(value.detach()), num_tokens + len(new)
            if objective.is_clipped is not None:
                num_clipped, clips = num_clipped + int(objective.is_clipped.sum()), True
            found |= _by_datum(asked.order, new.detach().cpu().numpy(), data)
            if progress is not None:
                progress(num_done, len(packs))
        if fault := next(filter(None, self.ranks.gather(fault, str)), ""):
            raise LearnerError(fault)
        if back:
            self._add_up()
        parts = self.ranks.gather(_Part(found, total, num_tokens, num_clipped if clips else None), _Part)
        return _total(parts, len(data))

    def _add_up(self) -> None:
        """Adds the gradients of all processes up, in one message."""
        if self.ranks.size == 1:
            return
        parameters = list(self.parameters.values())
        whole = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).ravel() for p in parameters])
        self.ranks.add_up(whole)
        for parameter, part in zip(parameters, torch.split(whole, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def _numbers(
        self, asked: DatumPack, data: Sequence[Datum], loss: TokenLoss, settings: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Returns the loss's numbers as tensors of the pack's terms, or scalars where no datum brings them."""
        numbers = {}
        for name in (*loss.needs, *loss.takes, *loss.may_bring, SHARES):
            if any(name in data[index].numbers for index in asked.order):
                parts = [self._of_datum(data[index], name, loss, settings) for index in asked.order]
                numbers[name] = self._tensor(np.concatenate(parts)).float()
            elif name in loss.takes:
                numbers[name] = torch.tensor(_setting(name, loss, settings), device=self.weights.device)
        return numbers

    @staticmethod
    def _of_datum(datum: Datum, name: str, loss: TokenLoss, settings: Mapping[str, float]) -> Floats:
        if name in datum.numbers:
            return datum.numbers_of(name)
        return np.full(datum.num_terms, _setting(name, loss, settings) if name in loss.takes else 1.0)

    @contextlib.contextmanager
    def _running(self, samples: Sequence[Sample], *, compares: bool) -> Iterator[None]:
        """Holds the weights. `compares`: the first batch shows whether packs hold, before there are gradients."""
        try:
            with self.weights.lock:
                self.packing.probe(samples[0])
                if compares and not any(parameter.grad is not None for parameter in self.parameters.values()):
                    self.packing.compare(samples)
                with self.runner.running():
                    yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("out of memory: send fewer or shorter data at once") from error

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)


def _total(parts: Sequence[_Part], num_data: int) -> Passed:
    """Returns the pass of all processes. A process that ran no pack has no clip."""
    logprobs = {index: row for part in parts for index, row in part.logprobs.items()}
    num_tokens = sum(part.num_tokens for part in parts)
    clipped = [part.num_clipped for part in parts if part.num_clipped is not None]
    return Passed(
        [logprobs[index] for index in range(num_data)],
        sum(part.loss for part in parts),
        num_tokens,
        sum(clipped) / max(1, num_tokens) if clipped else None,
    )


def _by_datum(order: Sequence[int], values: Floats, data: Sequence[Datum]) -> dict[int, Floats]:
    """Returns [n, K] the values of a pack's terms, by the index of their datum."""
    found, start = {}, 0
    for index in order:
        size = data[index].num_terms
        found[index] = data[index].whole(values[start : start + size])
        start += size
    return found


def _setting(name: str, loss: TokenLoss, settings: Mapping[str, float]) -> float:
    value = settings.get(name, loss.takes[name])
    assert value is not None, f"{name} was not checked"
    return value
