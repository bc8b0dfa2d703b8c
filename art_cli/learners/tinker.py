"""TinkerLearner: the Learner whose weights are on a server of the Tinker protocol.

    groups -> samples, as every learner makes them -> each token's numbers -> forward_backward, optim_step on the server

Credit, masks, means, the schedule and the clip are computed here, and the server's loss is a sum (tinker_losses.py).
The torch learner's step is the same step. A checkpoint directory holds the server's paths of what it saved
(remote.json).

Nothing is applied twice. The SDK numbers its requests, and a server runs each number once. After a failure in a step
the training client is dropped, and the next call makes one from the last saved state, as a new process does.
"""

import logging
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from art_cli.config.schema import LoraConfig, LossConfig, SftConfig, TinkerEngineConfig, TrainConfig
from art_cli.durable import write_lines
from art_cli.errors import DriftError, LearnerError, RemoteError
from art_cli.learners import Progress, SftProgress, StepMetrics
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.learned import StepRecord
from art_cli.learners.samples import Sample, bare_sample
from art_cli.learners.schedule import EPS, WINDOW, clip_limit, rate_of_step
from art_cli.learners.step_plan import PlannedStep, plan_step
from art_cli.learners.step_samples import StepSamples
from art_cli.learners.tinker_losses import WeightedSample, server_loss, weigh
from art_cli.learners.token_weights import CROSS_ENTROPY, Floats
from art_cli.policy_spec import PolicySpec
from art_cli.remote.checkpoint import (
    TEMPLATE_FILE,
    RemoteCheckpoint,
    read_lease,
    read_remote,
    write_lease,
    write_remote,
)
from art_cli.remote.connection import RemoteSession
from art_cli.remote.server import find_server
from art_cli.trajectory import LearnedTrajectory, ScoredTrajectory

log = logging.getLogger(__name__)

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


class TinkerLearner:
    """The Learner of `learner: tinker`. The protocol says what its methods promise. Failures raise RemoteError too."""

    def __init__(
        self,
        policy: PolicySpec,
        *,
        train: TrainConfig,
        loss: LossConfig,
        engine: TinkerEngineConfig,
        lora: LoraConfig,
        learner: object = None,
        sft: SftConfig | None = None,
        sampling_max_tokens: int = 1024,
        directory: Path = Path(),
    ) -> None:
        """Raises RemoteError: the key of the server is not there."""
        self.policy, self.train_config, self.loss, self.lora = policy, train, loss, lora
        self.algorithm = build_algorithm(loss, max_tokens=sampling_max_tokens, directory=directory)
        self.server_loss = server_loss(loss)
        self.server, self.timeout_s = find_server(engine), engine.timeout_s
        self.base = engine.base_model or policy.base
        self.saved: RemoteCheckpoint | None = None  # the next training client begins with it; None: with a new adapter
        self._connection: RemoteSession | None = None
        self._trainer: Any = None  # the SDK's training client; None: the next call makes one
        self._num_steps = self._num_updates = 0
        self._norms: tuple[float, ...] = ()
        self._learned: list[LearnedTrajectory] = []  # lines of the last step, until they are written

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes one policy step. After any failure the weights are those of the last checkpoint.

        Raises LearnerError: tokens that the server cannot train on; DriftError: engine and learner hold different
        weights.
        """
        begin = time.perf_counter()
        record = StepRecord() if self.train_config.record_learned else None
        plan = plan_step(groups, self.algorithm, loss=self.loss, train=self.train_config, record=record)
        rate = rate_of_step(self.train_config, self._num_steps)
        numbers = _Numbers(groups)
        if plan.parts:
            _check_temperatures(plan)
            try:
                self._take_updates(plan, rate, numbers, record, progress)
            except BaseException:
                self._drop()
                raise
        if record is not None:
            self._learned = record.lines(groups)
        return numbers.metrics(plan.batch, learning_rate=rate, train_s=time.perf_counter() - begin)

    def write_learned(self, path: Path) -> None:
        learned, self._learned = self._learned, []
        write_lines(path, learned)

    def _take_updates(
        self,
        plan: PlannedStep,
        rate: float,
        numbers: "_Numbers",
        record: StepRecord | None,
        progress: Progress | None,
    ) -> None:
        """Takes the optimizer steps of all epochs."""
        mean_over, epochs = self.loss.mean_over, self.train_config.epochs_per_step
        updates = [weigh(part, self.algorithm, plan.finished, mean_over=mean_over) for part in plan.parts]
        for part in plan.parts:
            numbers.add_counts(part)
        updates = [self._look_ahead(update) for update in updates]
        total = epochs * len(updates)
        for index, update in enumerate(updates * epochs):
            number = index if index < len(updates) else None  # None: not the first epoch
            step = None if index == 0 else rate  # the first gradient is applied after it was compared with the engine
            new = self._add_gradient(update, step, numbers, record, number)
            if index == 0:
                numbers.add_gap([each.sample for each in update], new)
                self._check_drift(numbers)
                self._apply(self._submit_update(rate), numbers)
            if progress is not None:
                progress(index + 1, total)
        self._num_steps += 1

    def _look_ahead(self, update: list[WeightedSample]) -> list[WeightedSample]:
        """The update with the policy's logprobs, where its loss needs them and the engine's are not comparable."""
        if not any(each.is_unknown for each in update):
            return update
        found = self._forward([each.sample for each in update])
        return [each.with_old(logprobs) for each, logprobs in zip(update, found, strict=True)]

    def _add_gradient(
        self,
        update: list[WeightedSample],
        rate: float | None,
        numbers: "_Numbers",
        record: StepRecord | None,
        number: int | None,
    ) -> list[Floats]:
        """The logprobs of each sample's targets, after the update's gradient was added up on the server.

        With `rate` the optimizer step is sent right behind it, so that the server need not wait for us.
        """
        trainer = self._present_trainer()
        sent: list[tuple[list[WeightedSample], Any]] = []
        if self.server_loss.name is None:
            new = self._forward([each.sample for each in update])
            sent.append((update, self._send_slopes(update, new)))
        else:
            in_policy = [each for each in update if each.in_policy.any()]
            if in_policy:
                data = [self._datum(each.sample, advantages=each.advantages, logprobs=each.old) for each in in_policy]
                loss = self.server_loss
                sent.append((in_policy, trainer.forward_backward(data, loss.name, loss.settings)))
            if imitated := [each for each in update if not np.isnan(each.imitation).all()]:
                data = [self._datum(each.sample, weights=each.imitation) for each in imitated]
                sent.append((imitated, trainer.forward_backward(data, "cross_entropy")))
        applied = None if rate is None else self._submit_update(rate)
        by_sample: dict[int, Floats] = {}
        for part, future in sent:
            answer = self._wait(future, "forward_backward")
            for each, logprobs in zip(part, _logprobs(answer, [each.sample for each in part]), strict=True):
                by_sample[id(each)] = logprobs
        found = [by_sample[id(each)] for each in update]
        numbers.add_update(update, found, self.server_loss.values, record, number)
        if applied is not None:
            self._apply(applied, numbers)
        return found

    def _send_slopes(self, update: list[WeightedSample], new: list[Floats]) -> Any:
        """The second of two passes: the slope of the loss by each token's logprob, as a weight of cross_entropy."""
        data = []
        for each, logprobs in zip(update, new, strict=True):
            weights, inside = np.nan_to_num(each.imitation), each.in_policy
            if inside.any():
                found = self.server_loss.values(logprobs[inside], each.old[inside], each.advantages[inside])
                weights[inside] -= found.slopes
            data.append(self._datum(each.sample, weights=weights))
        return self._present_trainer().forward_backward(data, "cross_entropy")

    def _submit_update(self, rate: float) -> Any:
        config, types = self.train_config, self._opened().types
        limit = clip_limit(config, self._norms)
        adam = types.AdamParams(
            learning_rate=rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=EPS,
            weight_decay=config.weight_decay,
            grad_clip_norm=limit,
        )
        return limit, self._present_trainer().optim_step(adam)

    def _apply(self, submitted: tuple[float, Any], numbers: "_Numbers") -> None:
        """Waits until the server has taken the optimizer step."""
        limit, future = submitted
        answer = self._wait(future, "optim_step")
        norm = _norm_of(answer)
        self._num_updates += 1
        if math.isnan(norm):
            if self.train_config.clip_to_history is not None:
                raise LearnerError(
                    f"train.clip_to_history: {self.server.url} does not report the norm of a gradient; set it to null"
                )
        else:
            self._norms = (*self._norms, norm)[-WINDOW:]
        numbers.norms.append((norm, min(norm, limit)))

    def _check_drift(self, numbers: "_Numbers") -> None:
        bound, gap = self.train_config.max_logprob_gap, numbers.gap
        if gap > bound:
            raise DriftError(
                f"engine and learner differ by {gap:.3g} nats per token on average (at most {numbers.gap_max:.3g}), "
                f"over train.max_logprob_gap = {bound:g}: they do not hold the same weights"
            )

    # --- other methods of the protocol --------------------------------------------------------------------------------

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        raise LearnerError("sft: learner 'tinker' has no warm-up; make it with art sft and learner=torch")

    def take_sft(self, num_updates: int) -> SftProgress:
        raise AssertionError("begin_sft comes first")

    def end_sft(self) -> None:
        """Nothing to free, because there is no warm-up."""

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[L - 1] logprobs in nats of each token after the first. Raises LearnerError: a temperature other than 1."""
        if temperature not in (0.0, 1.0):
            raise LearnerError(f"a server of the Tinker protocol has no logprobs at temperature {temperature:g}")
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2:
            return []
        [found] = self._forward([bare_sample(ids, np.arange(1, len(ids)), "probe")])
        return [float(value) for value in found]

    def save(self, directory: Path) -> None:
        """Has the server save state and sampler weights, and writes their paths."""
        trainer = self._present_trainer()
        name = f"{self._num_updates:06d}-{secrets.token_hex(6)}"  # no other save has this name, so none is overwritten
        futures = trainer.save_state(name), trainer.save_weights_for_sampler(name)
        state, sampler = (str(self._wait(future, "saving the weights").path) for future in futures)
        try:
            self.saved = RemoteCheckpoint(
                url=self.server.url,
                base_model=self.base,
                state=state,
                sampler=sampler,
                num_steps=self._num_steps,
                num_updates=self._num_updates,
                norms=self._norms,
            )
        except ValueError as error:
            raise RemoteError(f"{self.server.url}: it saved the weights, and {error}") from None
        write_remote(directory, self.saved)
        write_lease(directory.parent, self.server.url, str(trainer.model_id))
        if self.policy.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.policy.chat_template, encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote, also on another machine. Raises CheckpointError: no such file there."""
        self._drop()
        self.saved = read_remote(directory)
        if model_id := read_lease(directory.parent, self.server.url):
            self.server.tell("unload_model", {"model_id": model_id})  # a process that was killed has left it
        self._present_trainer()

    def check(self) -> None:
        """Nothing to check: a wait for the server ends by itself when the server is gone."""

    def close(self) -> None:
        connection, self._connection, self._trainer = self._connection, None, None
        if connection is not None:
            connection.close()

    # --- the server ---------------------------------------------------------------------------------------------------

    def _opened(self) -> RemoteSession:
        if self._connection is None:
            self.server.find_model(self.base)
            self._connection = RemoteSession(self.server, timeout_s=self.timeout_s)
        return self._connection

    def _present_trainer(self) -> Any:
        """The training client; where there is none, one of the last saved state, or of a new adapter."""
        if self._trainer is None:
            connection, saved = self._opened(), self.saved
            if saved is not None:
                self._trainer = connection.saved_trainer(saved.state)
                self._num_steps, self._num_updates, self._norms = saved.num_steps, saved.num_updates, saved.norms
            else:
                attention, mlp = parts_of(self.lora)
                self._trainer = connection.new_trainer(
                    self.base, rank=self.lora.rank, seed=self.train_config.seed, attention=attention, mlp=mlp
                )
                self._num_steps = self._num_updates = 0
                self._norms = ()
        return self._trainer

    def _drop(self) -> None:
        """Gives the training client up, with the gradients that it holds."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            self.server.tell("unload_model", {"model_id": str(trainer.model_id)})

    def _forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """The logprobs of each sample's targets at the present weights."""
        data = [self._datum(sample, weights=np.ones(len(sample.targets))) for sample in samples]
        answer = self._wait(self._present_trainer().forward(data, "cross_entropy"), "forward")
        return _logprobs(answer, samples)

    def _wait(self, future: Any, what: str) -> Any:
        return self._opened().wait(future, what)

    def _datum(self, sample: Sample, **numbers: Floats) -> Any:
        """The sample up to its last target, shifted by one as the protocol has it; tokens without a number have 0."""
        types, end = self._opened().types, int(sample.targets[-1])
        inputs: dict[str, Any] = {"target_tokens": sample.token_ids[1 : end + 1].astype(np.int64)}
        for name, values in numbers.items():
            row = np.zeros(end, dtype=np.float32)
            row[sample.targets - 1] = np.nan_to_num(values)
            inputs[name] = row
        return types.Datum(
            model_input=types.ModelInput.from_ints(sample.token_ids[:end].tolist()), loss_fn_inputs=inputs
        )


def parts_of(lora: LoraConfig) -> tuple[bool, bool]:
    """Whether attention and MLP get an adapter. Raises LearnerError: modules that the protocol cannot name."""
    if lora.targets == "all-linear":
        return True, True
    named = {lora.targets} if isinstance(lora.targets, str) else set(lora.targets)
    for choice, found in ((ATTENTION | MLP, (True, True)), (ATTENTION, (True, False)), (MLP, (False, True))):
        if named == choice:
            return found
    raise LearnerError(
        "model.lora.targets: a server of the Tinker protocol adapts all of attention, all of the MLP, or both: "
        "all-linear, or the names of one of them"
    )


def _check_temperatures(plan: PlannedStep) -> None:
    for sample in (sample for part in plan.parts for sample in part):
        if (sample.temperatures != 1).any():
            other = float(sample.temperatures[sample.temperatures != 1][0])
            raise LearnerError(
                f"trajectory {sample.trajectory_id}: sampled at temperature {other:g}, and a server of the Tinker "
                "protocol computes logprobs at 1 only: rollout.sampling.temperature=1, and rollout.sampling.force=true "
                "where the agent sets its own"
            )


def _logprobs(answer: Any, samples: Sequence[Sample]) -> list[Floats]:
    """[N] of each sample's targets. Raises RemoteError: the server gave something else."""
    outputs = answer.loss_fn_outputs
    found: list[Floats] = []
    if len(outputs) == len(samples):
        for output, sample in zip(outputs, samples, strict=True):
            row = np.asarray(output["logprobs"].to_numpy(), dtype=np.float64).ravel() if "logprobs" in output else None
            if row is None or len(row) != sample.targets[-1]:
                break
            found.append(row[sample.targets - 1])
    if len(found) != len(samples) or not all(np.isfinite(row).all() for row in found):
        raise RemoteError("the server's answer lacks finite logprobs of each token that was sent")
    return found


def _norm_of(answer: Any) -> float:
    """The norm of the gradient before the clip; NaN: the server does not say."""
    metrics = getattr(answer, "metrics", None) or {}
    for name, value in metrics.items():
        if name.partition(":")[0].rpartition("/")[2] == "grad_norm":  # SkyRL puts its own address before
            return float(value)
    return math.nan


class _Numbers:
    """What a step reports."""

    def __init__(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        newest = max((trajectory.step for group in groups for trajectory in group), default=0)
        self._replayed = {each.id for group in groups for each in group if each.step < newest}
        self.norms: list[tuple[float, float]] = []  # gradient norms of each optimizer step, before and after the clip
        self._samples: list[Sample] = []
        self._losses: list[float] = []
        self._clipped: list[Floats] = []
        self._imitated: list[Floats] = []
        self._gaps: list[Floats] = []

    def add_counts(self, samples: Sequence[Sample]) -> None:
        self._samples += samples

    def add_gap(self, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> None:
        """Adds the distances between the learner's logprobs and the engine's at the weights that sampled."""
        for sample, new in zip(samples, logprobs, strict=True):
            if sample.trajectory_id not in self._replayed:
                engine = np.where(np.isnan(sample.logprobs), sample.raw_logprobs, sample.logprobs)
                gaps = np.abs(engine - new)
                self._gaps.append(gaps[~np.isnan(gaps)])

    def add_update(
        self,
        update: Sequence[WeightedSample],
        logprobs: Sequence[Floats],
        values: Any,
        record: StepRecord | None,
        number: int | None,
    ) -> None:
        """Adds an optimizer step's losses. `number`: its place in the first epoch; None: it is of a later one."""
        total = 0.0
        for each, new in zip(update, logprobs, strict=True):
            inside, is_imitated, loss = each.in_policy, ~np.isnan(each.imitation), 0.0
            if inside.any():
                found = values(new[inside], each.old[inside], each.advantages[inside])
                loss += math.fsum(found.values)
                self._clipped.append(found.is_clipped)
            if is_imitated.any():
                loss -= math.fsum(each.imitation[is_imitated] * new[is_imitated])
                self._imitated.append(-new[is_imitated])
            total += loss
            if record is not None and number is not None:
                record.note_learned(each.sample, new, loss=loss, update=number)
        self._losses.append(total)

    @property
    def gap(self) -> float:
        return _mean(self._gaps)

    @property
    def gap_max(self) -> float:
        return max((float(part.max()) for part in self._gaps if len(part)), default=math.nan)

    def metrics(self, batch: StepSamples, *, learning_rate: float, train_s: float) -> StepMetrics:
        samples, num = self._samples, len(self.norms)
        num_flat = sum(len(sample.token_ids) for sample in samples)
        return StepMetrics(
            **batch.reported(),
            num_samples=len(samples),
            num_updates=num,
            tokens_trained=sum(len(sample.targets) for sample in samples),
            tokens_imitated=sum(sample.num_in(CROSS_ENTROPY) for sample in samples),
            tokens_flat=num_flat,
            tokens_computed=num_flat,
            loss=math.fsum(self._losses) / num if num else math.nan,
            cross_entropy=_mean(self._imitated),
            clip_fraction=_mean(self._clipped),
            grad_norm=math.fsum(norm for norm, _ in self.norms) / num if num else math.nan,
            grad_clip=math.fsum(norm for _, norm in self.norms) / num if num else math.nan,
            learning_rate=learning_rate if num else math.nan,
            logprob_gap=self.gap,
            logprob_gap_max=self.gap_max,
            train_s=train_s,
        )


def _mean(parts: Sequence[Floats]) -> float:
    num = sum(map(len, parts))
    return float(sum(float(part.sum()) for part in parts)) / num if num else math.nan
