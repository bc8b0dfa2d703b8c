"""TorchLearner: updates the policy's weights with torch, in this process, sharing them with the engine.

    groups -> batch -> per optimizer step: gradient -> clip -> AdamW -> a checkpoint directory

It decides nothing about rewards (judges) or when to step (the loop). It reads and writes a checkpoint directory: the
adapter and tokenizer in PEFT's format, the states of the optimizer and the RNG as safetensors and JSON.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import AlgorithmConfig, BaseLearnerConfig, LossConfig, SftConfig, TrainConfig
from art_cli.learners import Progress, SftProgress, StepMetrics
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.off_policy import build_correction
from art_cli.learners.algorithms.ppo import Ppo
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.algorithms.trust_region import hold
from art_cli.learners.critic import Critic
from art_cli.learners.gradient import LossGradient, Update
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.logprob_reader import Reader
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.processes.ranks import Ranks
from art_cli.learners.samples import Sample, bare_sample
from art_cli.learners.schedule import warm_up_settings
from art_cli.learners.sft.examples import example_samples
from art_cli.learners.sft.sft_batches import plan_batches
from art_cli.learners.sft.sft_trainer import Sft
from art_cli.learners.step_plan import PlannedStep, plan_step
from art_cli.learners.step_statistics import StepStatistics
from art_cli.learners.token_weights import CROSS_ENTROPY, POLICY, REFERENCE_KL
from art_cli.learners.training_record import StepRecord
from art_cli.models.loading import Weights, load_checkpoint, save_weights
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import LearnedTrajectory, ScoredTrajectory
from art_cli.runtime.errors import DriftError, LearnerError

log = logging.getLogger(__name__)

RNG_FILE = "rng.safetensors"


class TorchLearner:
    """The Learner of `learner: torch` and `learner: unsloth`. The protocol says what its methods promise."""

    def __init__(
        self,
        weights: Weights,
        *,
        train: TrainConfig,
        loss: LossConfig | AlgorithmConfig,
        learner: BaseLearnerConfig,
        sft: SftConfig | None = None,
        sampling_max_tokens: int = 1024,
        directory: Path = Path(),
        ranks: Ranks | None = None,
    ) -> None:
        """`sampling_max_tokens` is the length limit of one reply; a user's algorithm is relative to `directory`.

        `ranks` are the processes that share the work; None: this one alone. Raises LearnerError: a KL term without an
        adapter to switch off; UsageError: a user's algorithm that cannot be loaded.
        """
        if loss.kl > 0 and not weights.has_adapter:
            raise LearnerError("loss.kl needs a reference policy, the model without its adapter: set model.lora")
        self.weights, self.loss = weights, loss
        self.train_config, self.sft_config = train, sft
        self.kl, self.echo = loss.kl, loss.echo
        self.algorithm = build_algorithm(loss, max_tokens=sampling_max_tokens, directory=directory)
        self.ranks = ranks or Ranks()
        self.runner = PackRunner(weights, learner, self.ranks)
        self.gradient = LossGradient(
            self.runner, self.algorithm, correction=build_correction(loss.off_policy), mean_over=loss.mean_over
        )
        self.warm_up: Sft | None = None  # set between begin_sft and end_sft
        self._learned: list[LearnedTrajectory] = []  # lines of the last step, until they are written
        self.packing = PackingCheck(self.runner)
        self.algorithm.bind(Reader(self.runner, self.packing), directory)
        self.parameters = {name: p for name, p in weights.model.named_parameters() if p.requires_grad}
        self.optimizer_device = torch.device("cpu") if learner.offload_optimizer else None
        self.optimizer = Optimizer(self.parameters, train, device=self.optimizer_device, ranks=self.ranks)
        self.critic: Critic | None = None
        if isinstance(self.algorithm, Ppo):
            self.critic = Critic(self.runner, self.algorithm.knobs, train, device=self.optimizer_device)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The policy's optimizer, then the critic's if there is one."""
        return [self.optimizer, *([] if self.critic is None else [self.critic.optimizer])]

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes one policy step. After any failure every weight is what it was before.

        Raises LearnerError: a loss that is not finite, or out of memory; DriftError: engine and learner hold different
        weights (contract 2).
        """
        begin = time.perf_counter()
        record = StepRecord() if self.train_config.record_learned else None
        batch, parts, finished = self._plan(groups, record)
        statistics = StepStatistics(_replayed(groups))
        learning_rate, bonus = self.optimizer.current_rate(), self._entropy_bonus()
        if parts:
            with self._changing_weights(parts[0][0], batch=parts[0]):
                updates = [self.gradient.plan(part, finished, entropy_bonus=bonus or 0.0) for part in parts]
                for update in updates:
                    statistics.add_counts(update.packs)
                self._take_updates(updates, statistics, record, progress)
                self.algorithm.after_step()
        statistics = StepStatistics.total(self.ranks.gather(statistics, StepStatistics))
        if record is not None:
            self._learned = StepRecord.total(self.ranks.gather(record, StepRecord)).lines(groups)
        if self.loss.entropy_floor is not None:
            self.optimizer.counts.entropy = self.optimizer.counts.entropy.after(
                statistics.entropy.mean, floor=self.loss.entropy_floor, step=self.loss.entropy_step
            )
        seconds = time.perf_counter() - begin
        metrics = statistics.metrics(
            batch,
            packed=self.runner.can_pack,
            learning_rate=learning_rate,
            entropy_bonus=bonus,
            train_s=seconds,
        )
        return msgspec.structs.replace(metrics, **self.algorithm.numbers())

    def _plan(self, groups: Sequence[Sequence[ScoredTrajectory]], record: StepRecord | None) -> PlannedStep:
        with self._naming_memory():
            return plan_step(groups, self.algorithm, loss=self.loss, train=self.train_config, record=record)

    def write_learned(self, path: Path) -> None:
        learned, self._learned = self._learned, []
        if self.ranks.rank == 0:
            write_lines(path, learned)

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        """The number of optimizer steps to come. Raises LearnerError: no examples, or one that cannot be trained on."""
        config = self.sft_config
        assert config is not None, "sft needs an sft section"
        batches = plan_batches(self._sft_samples(examples, "demo"), config, seed=self.train_config.seed)
        settings = warm_up_settings(config, batches.num_updates)
        optimizer = Optimizer(self.parameters, settings, device=self.optimizer_device, ranks=self.ranks)
        held_out = [sample for samples in self._sft_samples(evaluated, "evaluation demo") for sample in samples]
        self.warm_up = Sft(batches, held_out, config, optimizer)
        return batches.num_updates

    def _sft_samples(self, examples: Sequence[dict[str, Any]], kind: str) -> list[list[Sample]]:
        weights = self.weights
        limits = {"max_length": weights.max_length, "vocabulary": int(weights.model.config.vocab_size)}
        return [
            example_samples(example, weights.tokenizer, name=f"{kind} {number}", **limits)
            for number, example in enumerate(examples, 1)
        ]

    def take_sft(self, num_updates: int) -> SftProgress:
        assert self.warm_up is not None, "begin_sft comes first"
        with self._changing_weights(self.warm_up.batches.examples[0][0]):
            return self.warm_up.take(LossGradient(self.runner, Algorithm()), num_updates)

    def end_sft(self) -> None:
        self.warm_up = None

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[L - 1] logprobs in nats of each token after the first. Temperature 0 counts as 1."""
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2:
            return []
        sample = bare_sample(ids, np.arange(1, len(ids)), "probe", temperature=temperature or 1.0)
        with self._running(sample), torch.no_grad():
            [pack] = self.runner.pack([sample])
            scores: list[float] = self.runner.run(pack).logprobs[pack.terms.edges].tolist()
        return scores

    def save(self, directory: Path) -> None:
        with self.weights.lock:
            tensors = {name: self.ranks.whole(p).detach().cpu() for name, p in self.parameters.items()}
            if self.ranks.rank == 0:
                save_weights(self.weights, directory, tensors=tensors if self.ranks.size > 1 else None)
                save_file(_rng_state(), directory / RNG_FILE)
            self.optimizer.save(directory)
            self.algorithm.save(directory)
            if self.critic is not None:
                self.critic.save(directory)
            if self.warm_up is not None:
                self.warm_up.save(directory)

    def load(self, directory: Path) -> None:
        """Continues from a checkpoint directory; one with weights alone starts a new optimizer.

        Raises CheckpointError: no weights there, or another model's.
        """
        with self.weights.lock:
            load_checkpoint(self.weights, directory, part=self.ranks.part)
            if (directory / RNG_FILE).is_file():
                self.optimizer.load(directory)
                _set_rng_state(load_file(directory / RNG_FILE))
            else:
                self.optimizer.reset()
                log.info("%s: weights without optimizer state; the optimizer starts anew", directory)
            self.algorithm.load(directory)
            if self.critic is not None:
                self.critic.load(directory)
            if self.warm_up is not None:
                self.warm_up.load(directory)

    def start(self) -> None:
        """Nothing to start, because there is no other process."""

    def check(self) -> None:
        """Nothing to check, because no other process is needed."""

    def close(self) -> None:
        """Nothing to close, because there is no other process."""

    def _entropy_bonus(self) -> float | None:
        """The reward of a nat of entropy in the present step; None: the loss has no floor."""
        return None if self.loss.entropy_floor is None else self.optimizer.counts.entropy.bonus

    # --- the updates of a step ----------------------------------------------------------------------------------------

    def _take_updates(
        self,
        updates: list[Update],
        statistics: StepStatistics,
        record: StepRecord | None,
        progress: Progress | None,
    ) -> None:
        """Takes the optimizer steps of all epochs, or none. If one fails, those before it are undone.

        The first one that leaves the trust region, if there is one, is drawn back and is the last.
        """
        epochs, is_bounded = self.train_config.epochs_per_step, self.train_config.max_kl is not None
        is_undone = epochs * len(updates) > 1 or is_bounded
        snapshots = [optimizer.snapshot() for optimizer in self.optimizers if is_undone]
        done = _Counter(progress, total=epochs * sum(len(update.packs) for update in updates))
        try:
            # the first update needs no look ahead unless it is taken again at other weights
            at_first = [] if epochs > 1 else updates[:1]
            later = updates[len(at_first) :]
            updates = at_first + [self.gradient.look_ahead(each, statistics, always=is_bounded) for each in later]
            for index, update in enumerate(updates * epochs):
                recorded = {}
                if record is not None and index < len(updates):  # this is the first epoch
                    recorded = {"record": partial(record.add, update=index)}
                logprobs = self.gradient.accumulate(update, statistics, is_first=index == 0, done=done, **recorded)
                if index == 0:
                    self._check_drift(statistics)
                    update = update._replace(before=logprobs)
                before = self.optimizer.remember() if is_bounded else {}
                self._apply(update, statistics)
                if is_bounded and self._moves_policy(update) and not self._stays_near(update, before, statistics):
                    break
        except BaseException:
            for optimizer, snapshot in zip(self.optimizers, snapshots, strict=False):
                optimizer.restore(snapshot)
            raise
        for optimizer in self.optimizers:
            optimizer.counts.num_steps += 1

    def _check_drift(self, statistics: StepStatistics) -> None:
        if self.train_config.max_staleness > 0:
            return  # older policies sampled these tokens, so they may differ; the probe after each load is the guard
        bound, gap = (
            self.train_config.max_logprob_gap,
            StepStatistics.total(self.ranks.gather(statistics, StepStatistics)).gap,
        )
        if gap.mean > bound:
            raise DriftError(
                f"engine and learner differ by {gap.mean:.3g} nats per token on average (at most "
                f"{gap.max:.3g}), over train.max_logprob_gap = {bound:g}: they do not hold the same weights"
            )

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

    def _stays_near(self, update: Update, before: dict[str, Tensor], statistics: StepStatistics) -> bool:
        """Whether the policy is within `max_kl` of the step's start. If not, the update is drawn back until it is."""
        assert self.train_config.max_kl is not None
        held = hold(self.gradient, self.optimizer, update, before, max_kl=self.train_config.max_kl)
        statistics.update_kl, statistics.update_share = held
        return held.share == 1

    def _moves_policy(self, update: Update) -> bool:
        """Whether the update says anything to the policy. Where all advantages are zero, only the critic may learn."""
        in_policy = any(update.counts[component].tokens for component in (POLICY, CROSS_ENTROPY, REFERENCE_KL))
        return in_policy or (self.critic is not None and self.critic.head.moves_trunk)

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.clear()

    # --- holding the weights ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self, sample: Sample, *, batch: Sequence[Sample] = ()) -> Iterator[None]:
        """Holds the weights inside the block. Running out of memory becomes a LearnerError that says what to do."""
        with self._naming_memory(), self.weights.lock:
            self.packing.probe(sample)
            if batch:
                self.packing.compare(batch)
            with self.runner.running():
                yield

    @contextlib.contextmanager
    def _naming_memory(self) -> Iterator[None]:
        """Running out of memory inside the block becomes a LearnerError that says what to do."""
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise LearnerError(
                f"out of memory; lower learner.micro_batch_tokens (now {self.runner.micro_batch_tokens}) or set "
                "learner.gradient_checkpointing=true"
            ) from error

    @contextlib.contextmanager
    def _changing_weights(self, sample: Sample, *, batch: Sequence[Sample] = ()) -> Iterator[None]:
        """As `_running`. Afterwards there are no gradients, and a new version of the weights invalidates caches."""
        with self._running(sample, batch=batch):
            try:
                yield
            finally:
                self._clear()
                self.weights.version += 1
                if self.weights.device.type == "cuda":
                    torch.cuda.empty_cache()  # torch keeps freed memory, and an engine that wakes on this GPU needs it


def _replayed(groups: Sequence[Sequence[ScoredTrajectory]]) -> frozenset[str]:
    """The ids of trajectories that were played for an earlier step than the newest ones."""
    newest = max((trajectory.step for group in groups for trajectory in group), default=0)
    return frozenset(trajectory.id for group in groups for trajectory in group if trajectory.step < newest)


class _Counter:
    """Calls `progress` with the number of packs done; call it after each pack."""

    def __init__(self, progress: Progress | None, *, total: int) -> None:
        self.progress, self.total, self.num_done = progress, total, 0

    def __call__(self) -> None:
        self.num_done += 1
        if self.progress is not None:
            self.progress(self.num_done, self.total)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
