"""TorchLearner: updates the policy's weights with torch in this process, sharing them with the engine.

    groups -> batch -> per optimizer step: gradient -> clip -> AdamW -> a checkpoint directory

It does not decide rewards (judges) or when to step (the loop). It reads and writes a checkpoint directory: adapter and
tokenizer in PEFT's format, optimizer and RNG state as safetensors and JSON. When an update leaves the trust region, the
weights are moved back toward their previous values.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import BaseLearnerConfig
from art_cli.learners import Learner, LearnerSetup, Progress, SftProgress, StepMetrics
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts
from art_cli.learners.algorithms.off_policy import build_correction
from art_cli.learners.algorithms.ppo import Ppo
from art_cli.learners.algorithms.presets import UserAlgorithm, build_algorithm
from art_cli.learners.critic import Critic
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.logprob_reader import Reader
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.probe import measure_probe
from art_cli.learners.samples import Row, Sample, bare_sample, check_fits
from art_cli.learners.schedule import warm_up_settings
from art_cli.learners.sft.examples import example_samples
from art_cli.learners.sft.sft_batches import plan_batches
from art_cli.learners.sft.torch_sft import TorchSft
from art_cli.learners.step.gradient import LossGradient, Update
from art_cli.learners.step.policy_step import Pass, take_step
from art_cli.learners.step.step_samples import PlannedStep
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.learners.step.training_record import StepRecord
from art_cli.models.device import forget_peak, peak
from art_cli.models.saved_weights import load_checkpoint, save_weights
from art_cli.models.weights import Weights
from art_cli.runs.durable import write_lines
from art_cli.runs.manifest import Probe
from art_cli.runs.trajectory import LearnedTrajectory, ScoredTrajectory
from art_cli.runtime.allocator import is_out_of_memory
from art_cli.runtime.errors import LearnerError, OutOfMemory

log = logging.getLogger(__name__)

LEAST_SHARE = 0.5**5  # of an update; KL is quadratic in small steps, so this leaves about a thousandth of its KL
AIM = 0.8  # share of the bound that an update is drawn back to
SAFETY = 2.0  # an update whose forecast KL is below the bound by this factor is not measured
RNG_FILE = "rng.safetensors"
SHORT = 128  # tokens in the rehearsal row used to compare packs with plain rows


@dataclass
class TrustRegion:
    """A step's bound. The next update's own forward pass measures the policy for free, so a measurement may wait.

    A measurement cannot wait after the last update; within the first epoch, where the next update is of attempts that
    an ended step leaves out; and with whole weights, whose copy would stay in memory during the next pass. After the
    last update it is left out if the KL so far says that the policy is far within the bound.
    """

    max_kl: float
    num_parts: int  # updates of an epoch
    num_updates: int
    can_wait: bool
    begin: list[Tensor] = field(default_factory=list)  # logprobs of the first update's packs at the step's start
    before: dict[str, Tensor] = field(default_factory=dict)  # weights before the newest update
    kl: float = math.nan  # the newest measurement
    is_left: bool = False  # whether the policy was past the bound, and the newest update was moved back

    def waits(self, number: int) -> bool:
        """Returns whether the pass after update `number` measures the policy."""
        return self.can_wait and self.num_parts <= number + 1 < self.num_updates

    def forecast(self, number: int) -> float:
        """Returns the KL after update `number`, quadratic in the number of updates; NaN before any measurement."""
        return self.kl * ((number + 1) / max(number, 1)) ** 2


class TorchLearner(Learner):
    """The Learner for `learner: torch` and `learner: unsloth`. The protocol documents the methods."""

    def __init__(self, weights: Weights, setup: LearnerSetup, *, ranks: Ranks | None = None) -> None:
        """`ranks` share the work (default: this process only). Raises UsageError for a user's unusable algorithm."""
        train, loss, learner = setup.train, setup.loss, setup.learner
        assert isinstance(learner, BaseLearnerConfig), f"a learner with weights here, not {learner.name}"
        self.weights, self.loss = weights, loss
        self.train_config, self.sft_config = train, setup.sft
        self.algorithm = build_algorithm(loss, max_tokens=setup.sampling_max_tokens, directory=setup.directory)
        self.ranks = ranks or Ranks()
        self.runner = PackRunner(weights, learner, self.ranks)
        self.gradient = LossGradient(
            self.runner, self.algorithm, correction=build_correction(loss.off_policy), mean_over=loss.mean_over
        )
        self.warm_up: TorchSft | None = None  # set between begin_sft and end_sft
        self._learned: list[LearnedTrajectory] = []  # last step's lines, until they are written
        self._region: TrustRegion | None = None  # of the present step
        self.packing = PackingCheck(self.runner)
        self.reader = Reader(self.runner, self.packing)
        self.algorithm.bind(self.reader, setup.directory)
        self.parameters = {name: p for name, p in weights.model.named_parameters() if p.requires_grad}
        self.optimizer_device = torch.device("cpu") if learner.offload_optimizer else None
        self.optimizer = Optimizer(self.parameters, train, device=self.optimizer_device, ranks=self.ranks)
        self.critic: Critic | None = None
        if isinstance(self.algorithm, Ppo):
            self.critic = Critic(self.runner, self.algorithm.knobs, train, device=self.optimizer_device)
        torch.manual_seed(train.seed)  # the same numbers in every process that starts the run or recomputes its steps

    @property
    def optimizers(self) -> list[Optimizer]:
        """The policy's optimizer, followed by the critic's optimizer if present."""
        return [self.optimizer, *([] if self.critic is None else [self.critic.optimizer])]

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes one policy step; a failure restores all weights. Raises LearnerError, and DriftError (contract 2)."""
        has_gpu = self.weights.device.type == "cuda"
        if has_gpu:
            forget_peak(self.weights)
        with self.naming_memory():
            metrics, self._learned = take_step(
                groups, self, algorithm=self.algorithm, loss=self.loss, train=self.train_config, progress=progress
            )
        numbers = dict(self.algorithm.numbers())
        if metrics.num_updates and self.runner.can_pack is not None:
            numbers |= {"packed": float(self.runner.can_pack)}
        if has_gpu and metrics.num_updates and (gigabytes := peak(self.weights)) is not None:
            numbers |= {"peak_gb": gigabytes}
        return msgspec.structs.replace(metrics, **numbers)

    def rehearse(self, num_tokens: int) -> float | None:
        ids = np.arange(num_tokens) * 7
        num_rows = max(1, self.runner.micro_batch_tokens // num_tokens)  # fills one pack
        made_up = [(ids + number) % self.weights.vocabulary for number in range(num_rows)]
        rows = [bare_sample(row, np.arange(1, num_tokens), "rehearsal") for row in made_up]
        random_state = _rng_state()
        try:
            self._reserve()
            with self._changing_weights(bare_sample(made_up[0][:SHORT], np.array([1]), "rehearsal")):
                before = self.optimizer.remember() if self.train_config.kl_bound is not None else {}
                forget_peak(self.weights)
                pack = self.runner.pack(rows, share=False)[0]
                self.runner.run(pack).logprobs.sum().backward()  # type: ignore[no-untyped-call]
                gigabytes = peak(self.weights)
                before.clear()  # so that its memory returns to the GPU
                return gigabytes
        except OutOfMemory as error:
            raise OutOfMemory(
                f"{error}; or lower model.max_length (tried before the first attempt with the longest possible "
                f"row, {num_tokens:,} tokens)"
            ) from error
        finally:
            _set_rng_state(random_state)

    def write_learned(self, path: Path) -> None:
        learned, self._learned = self._learned, []
        if self.ranks.rank == 0:
            write_lines(path, learned)

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        """Returns the number of optimizer steps. Raises LearnerError for missing or invalid examples."""
        config = self.sft_config
        assert config is not None, "sft needs an sft section"
        batches = plan_batches(self._sft_samples(examples, "demo"), config, seed=self.train_config.seed)
        settings = warm_up_settings(config, batches.num_updates)
        optimizer = Optimizer(self.parameters, settings, device=self.optimizer_device, ranks=self.ranks)
        held_out = [sample for samples in self._sft_samples(evaluated, "evaluation demo") for sample in samples]
        self.warm_up = TorchSft(batches, held_out, config, LossGradient(self.runner, Algorithm()), optimizer)
        return batches.num_updates

    def _sft_samples(self, examples: Sequence[dict[str, Any]], kind: str) -> list[list[Sample]]:
        weights = self.weights
        return [
            example_samples(
                example,
                weights.tokenizer,
                name=f"{kind} {number}",
                max_length=weights.max_length,
                vocabulary=weights.vocabulary,
                stops=weights.stop_ids,
            )
            for number, example in enumerate(examples, 1)
        ]

    def take_sft(self, num_updates: int, *, progress: Progress | None = None) -> SftProgress:
        assert self.warm_up is not None, "begin_sft comes first"
        self.warm_up.progress = progress
        self.warm_up.optimizer.reserve()
        with self._changing_weights(self.warm_up.batches.examples[0][0]):
            return self.warm_up.take(num_updates)

    def end_sft(self) -> None:
        self.warm_up = None

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns [L - 1] logprobs in nats, for every token but the initial one. Temperature 0 counts as 1."""
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2:
            return []
        sample = bare_sample(ids, np.arange(1, len(ids)), "probe", temperature=temperature or 1.0)
        with self.naming_memory():
            scores: list[float] = self.reader.logprobs([sample])[0].tolist()
        return scores

    def measure(self, before: Probe | None = None) -> Probe:
        return measure_probe(self.weights, self.score, before)

    def save(self, directory: Path) -> None:
        with self.weights.lock:
            tensors = self.ranks.collect(self.parameters)
            if self.ranks.rank == 0:
                save_weights(self.weights, directory, tensors=tensors if self.ranks.size > 1 else None)
                save_file(_rng_state(), directory / RNG_FILE)
            self.optimizer.save(directory)
            self.algorithm.save(directory)
            if self.critic is not None:
                self.critic.save(directory)
            if self.warm_up is not None:
                self.warm_up.save(directory)
            self._free_cache()

    def load(self, directory: Path) -> None:
        """Restores a checkpoint, with a new optimizer if it has none. Raises CheckpointError for another model's."""
        with self.weights.lock:
            load_checkpoint(self.weights, directory, part=self.ranks.part)
            if (directory / RNG_FILE).is_file():
                self.optimizer.load(directory)
                _set_rng_state(load_file(directory / RNG_FILE))
            else:
                self.optimizer.reset()
                log.info("%s: weights without optimizer state; the optimizer starts from zero", directory)
            self.algorithm.load(directory)
            if self.critic is not None:
                self.critic.load(directory)
            if self.warm_up is not None:
                self.warm_up.load(directory)
            if self.weights.device.type == "cuda":
                self._reserve()  # before an engine takes the rest of the memory
            self._free_cache()

    def start(self) -> None:
        """Does nothing, because there is no other process."""

    def check(self) -> None:
        """Does nothing, because there is no other process."""

    def close(self) -> None:
        """Does nothing, because there is no other process."""

    # --- the updates of a step ----------------------------------------------------------------------------------------

    ahead = 1  # each optimizer step finishes when it is applied

    @contextlib.contextmanager
    def taking(self, plan: PlannedStep) -> Iterator[float]:
        first, num_parts = plan.parts[0], len(plan.parts)
        num_updates = self.train_config.epochs_per_step * num_parts
        if (bound := self.train_config.kl_bound) is not None:
            # AdamW's updates do not shrink with the gradient, so the bound shrinks with the share of groups with signal
            num_with_signal = plan.batch.num_with_signal or int(self.algorithm.compares_groups)
            has_share = self.loss.mean_over == "all" and num_with_signal > 0
            bound *= num_with_signal / plan.batch.num_groups if has_share else 1.0
            self._region = TrustRegion(bound, num_parts, num_updates, can_wait=self.weights.has_adapter)
        for part in plan.parts:  # on a GPU, an id past the vocabulary would end the process
            check_fits(part, max_length=self.weights.max_length, vocabulary=self.weights.vocabulary)
        is_undone = num_updates > 1 or self._region is not None
        is_undone = is_undone or isinstance(self.algorithm, UserAlgorithm)  # its `after_step` may fail
        self._reserve()
        with self._changing_weights(first[0], batch=first):
            snapshots = [optimizer.snapshot() for optimizer in self.optimizers if is_undone]
            try:
                yield self.optimizer.current_rate()
                self.algorithm.after_step()
            except BaseException:
                for optimizer, snapshot in zip(self.optimizers, snapshots, strict=False):
                    optimizer.restore(snapshot)
                raise
            finally:
                self._region = None
            for optimizer in self.optimizers:
                optimizer.counts.num_steps += 1

    def plan(self, samples: Sequence[Sample], finished: FinishedCounts) -> Update:
        return self.gradient.plan(samples, finished)

    def count(self, update: Update, statistics: StepStatistics) -> int:
        for pack in update.packs:
            statistics.add_counts(pack.samples, num_computed=len(pack.token_ids))
        return len(update.packs)

    def forward(self, update: Update, at: Pass, *, is_first: bool) -> Update:
        if is_first:
            return update
        return self.gradient.look_ahead(update, at, always=self._region is not None and at.number > 0)

    def backward(self, update: Update, at: Pass) -> Update:
        """With a bound, the pass also measures how far earlier updates moved the policy, and may end the step."""
        logprobs, region = self.gradient.accumulate(update, at), self._region
        if region is None:
            return update
        if at.number == 0:
            region.begin = logprobs
        if at.number % region.num_parts == 0:
            update = update._replace(before=region.begin)
        if region.waits(at.number - 1):
            region.kl = self.gradient.divergence(update, now=logprobs)
            if region.kl > region.max_kl:
                self._clear()
                region.is_left = not self._hold(region, update, at, region.kl)
        return update

    def apply(self, sent: Update, at: Pass) -> bool:
        """Returns whether the policy is still within `max_kl`. If not, the update is moved back until it is."""
        region = self._region
        if region is None:
            self._apply(sent, at.statistics)
            return True
        if region.is_left:
            return False
        region.before = self.optimizer.remember()
        self._apply(sent, at.statistics)
        if region.waits(at.number) or not self._moves_policy(sent):
            return True
        if at.number + 1 == region.num_updates and region.forecast(at.number) * SAFETY <= region.max_kl:
            at.statistics.update_kl, at.statistics.update_share = region.forecast(at.number), 1.0
            return True
        return self._hold(region, sent, at)

    def _hold(self, region: TrustRegion, update: Update, at: Pass, kl: float | None = None) -> bool:
        """Draws the weights back to those before the update until the policy is within the bound.

        Each time to the distance where KL, quadratic in small steps, is AIM times the bound, and at least to the half.
        Below LEAST_SHARE the whole update is undone. The update must carry its packs' logprobs from the step's start.
        Cost: one forward pass unless the present `kl` is given, plus one each time, mostly once. The bound and the
        search back along the step are TRPO's, Schulman et al. 2015 (arXiv:1502.05477), equation 12; the step itself is
        AdamW's. Returns whether the update stays whole.
        """
        share = 1.0
        kl = self.gradient.divergence(update, heartbeat=at.heartbeat) if kl is None else kl
        while kl > region.max_kl and share > 0:  # a NaN KL (no tokens) counts as within the bound
            kept = min(0.5, math.sqrt(AIM * region.max_kl / kl)) if math.isfinite(kl) else 0.5
            kept = kept if share * kept >= LEAST_SHARE else 0.0
            self.optimizer.draw_back(region.before, 1.0 - kept)
            share *= kept
            kl = self.gradient.divergence(update, heartbeat=at.heartbeat)
        at.statistics.update_kl, at.statistics.update_share = kl, share
        return share == 1

    def finish(self, applied: bool, at: Pass) -> bool:
        return applied

    def gather(self, statistics: StepStatistics, record: StepRecord | None) -> tuple[StepStatistics, StepRecord | None]:
        statistics = StepStatistics.total(self.ranks.gather(statistics, StepStatistics))
        return statistics, None if record is None else StepRecord.total(self.ranks.gather(record, StepRecord))

    def _apply(self, update: Update, statistics: StepStatistics) -> None:
        limit = self.optimizer.clip_limit()
        norm, *others = [optimizer.clip() for optimizer in self.optimizers]
        if not all(map(math.isfinite, (norm, *others))):
            self._clear()
            raise LearnerError(self.gradient.blame(update, self.optimizer))
        for optimizer in self.optimizers:
            if optimizer is not self.optimizer or self._moves_policy(update):
                optimizer.update()
        statistics.grad_norms.append(norm)
        statistics.grad_clips.append(min(norm, limit))

    def _moves_policy(self, update: Update) -> bool:
        """Returns whether the update moves the policy. If all advantages are zero, perhaps only the critic learns."""
        moving = (Row.POLICY, Row.CROSS_ENTROPY, Row.REFERENCE_KL)
        is_moved_by_critic = self.critic is not None and self.critic.head.moves_trunk
        return is_moved_by_critic or any(update.counts[row].tokens for row in moving)

    def _reserve(self) -> None:
        for optimizer in self.optimizers:
            optimizer.reserve()

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.clear()

    # --- holding the weights ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self, sample: Sample, *, batch: Sequence[Sample] = ()) -> Iterator[None]:
        """Holds the weights inside the block. Running out of memory raises a LearnerError with a cure."""
        with self.naming_memory(), self.weights.lock:
            self.packing.probe(sample)
            if batch:
                self.packing.compare(batch)
            with self.runner.running():
                yield

    @contextlib.contextmanager
    def naming_memory(self) -> Iterator[None]:
        """Converts out-of-memory errors inside the block to OutOfMemory with a cure."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory; lower learner.micro_batch_tokens (now {self.runner.micro_batch_tokens}) or set "
                "learner.gradient_checkpointing=true"
            ) from error

    @contextlib.contextmanager
    def _changing_weights(self, sample: Sample, *, batch: Sequence[Sample] = ()) -> Iterator[None]:
        """Like `_running`, for changing weights: clears gradients, and raises the version to invalidate caches."""
        with self._running(sample, batch=batch):
            try:
                yield
            finally:
                self._clear()
                self.weights.version += 1
                self._free_cache()

    def _free_cache(self) -> None:
        """Returns torch's cached GPU memory, because an engine starts or wakes there next."""
        if self.weights.device.type == "cuda":
            torch.cuda.empty_cache()


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
