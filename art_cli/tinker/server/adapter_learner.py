"""AdapterLearner: trains an adapter with one client call at a time. Gradients accumulate until the client's update.

    data, loss -> packs -> logprobs -> values of the loss -> backward, into `.grad` ... -> AdamW

Algorithm, schedule and training loop belong to the client. Several adapters can share a base model. Each has a separate
learner, and the caller runs one learner at a time. A failed call leaves weights, gradients and optimizer unchanged.
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
    logprobs: list[Floats]  # [n, K] for each datum's targets; 0 in skipped rows
    loss: float  # sum over all tokens
    num_tokens: int
    clip_fraction: float | None  # share of clipped tokens; None for losses without clipping


class _Part(NamedTuple):
    """A pass's result from a single process."""

    logprobs: dict[int, Floats]  # by datum index
    loss: float
    num_tokens: int
    num_clipped: int | None  # None if the loss does not clip or no pack ran here


class AdapterLearner:
    """Trains the adapter of `weights`, or all weights if there is no adapter.

    Failures raise LearnerError or CheckpointError.
    """

    def __init__(self, weights: Weights, config: BaseLearnerConfig, *, ranks: Ranks | None = None) -> None:
        """`ranks` are the processes sharing each pass. All make the same calls. None means a single process."""
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
        """The adapter's rank; 0 when all weights are trained."""
        return int(self.weights.model.peft_config["default"].r) if self.weights.has_adapter else 0

    def close(self) -> None:
        """Does nothing, because there are no other processes."""

    def run(
        self,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        *,
        backward: bool,
        progress: Progress | None = None,
    ) -> Passed:
        """Returns target logprobs and the summed loss; `backward` adds gradients, unless LearnerError is raised."""
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
        """Takes an AdamW step and clears the gradients. Returns their norm. Raises LearnerError, weights unchanged."""
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
        self.optimizer.clear()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats for every token after the initial one."""
        ids = np.asarray(token_ids, dtype=np.int64)
        sample = bare_sample(ids, np.arange(1, len(ids)), "probe")
        with self._running([sample], compares=False), torch.no_grad():
            [pack] = self.runner.pack([sample])
            scores: list[float] = self.runner.run(pack).logprobs[pack.terms.edges].tolist()
        return scores

    def measure(self, before: Probe | None = None) -> Probe:
        """Returns a probe of the current weights, using the tokens of `before`, an earlier probe of this base model."""
        return measure_probe(self.weights, self.score, before)

    def copy_weights(self) -> Weights:
        """Returns a copy of the current policy. Later updates do not affect it."""
        return clone_trainable(self.weights)

    def save(self, directory: Path, *, optimizer: bool) -> None:
        """Writes adapter and tokenizer, and optionally the optimizer state. Only the first process writes."""
        with self.weights.lock:
            if self.ranks.rank == 0:
                save_weights(self.weights, directory)
                if optimizer:
                    self.optimizer.save(directory)
            self.ranks.gather(True, bool)  # other processes wait here before changing weights

    def load(self, directory: Path, *, optimizer: bool) -> int:
        """Loads an adapter with its optimizer state or a new one. Clears the gradients. Returns the updates so far."""
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
                continue  # only other processes have work in this pass
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
            rows, start = new.detach().cpu().numpy(), 0
            for index in asked.order:
                end = start + data[index].num_terms
                found[index] = data[index].whole(rows[start:end])
                start = end
            if progress is not None:
                progress(num_done, len(packs))
        if fault := next(filter(None, self.ranks.gather(fault, str)), ""):
            raise LearnerError(fault)
        if back:
            self._add_up()
        parts = self.ranks.gather(_Part(found, total, num_tokens, num_clipped if clips else None), _Part)
        return _total(parts, len(data))

    def _add_up(self) -> None:
        """Sums the gradients of all processes in one message."""
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
        """Returns the loss's numbers as tensors over the pack's terms. Settings that no datum overrides are scalars."""
        numbers = {}
        for name in (*loss.needs, *loss.takes, *loss.may_bring, SHARES):
            if any(name in data[index].numbers for index in asked.order):
                parts = [self._of_datum(data[index], name, loss, settings) for index in asked.order]
                numbers[name] = torch.from_numpy(np.concatenate(parts)).float().to(self.weights.device)
            elif name in loss.takes:
                numbers[name] = torch.tensor(_setting(name, loss, settings), device=self.weights.device)
        return numbers

    @staticmethod
    def _of_datum(datum: Datum, name: str, loss: TokenLoss, settings: Mapping[str, float]) -> Floats:
        if name in datum.numbers:
            return datum.numbers_of(name)
        if name == "sequence_ratio_mask":
            return np.not_equal(datum.numbers_of("advantages"), 0).astype(np.float64)
        return np.full(datum.num_terms, _setting(name, loss, settings) if name in loss.takes else 1.0)

    @contextlib.contextmanager
    def _running(self, samples: Sequence[Sample], *, compares: bool) -> Iterator[None]:
        """Locks the weights. `compares` validates packing on the first batch, before any gradients."""
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
            raise OutOfMemory("out of memory: send fewer or shorter data in a request") from error

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)


def _total(parts: Sequence[_Part], num_data: int) -> Passed:
    """Merges the results of all processes. Processes without packs do not count clipping."""
    logprobs = {index: row for part in parts for index, row in part.logprobs.items()}
    num_tokens = sum(part.num_tokens for part in parts)
    clipped = [part.num_clipped for part in parts if part.num_clipped is not None]
    return Passed(
        [logprobs[index] for index in range(num_data)],
        sum(part.loss for part in parts),
        num_tokens,
        sum(clipped) / max(1, num_tokens) if clipped else None,
    )


def _setting(name: str, loss: TokenLoss, settings: Mapping[str, float]) -> float:
    value = settings.get(name, loss.takes[name])
    assert value is not None, f"{name} was not checked"
    return value
