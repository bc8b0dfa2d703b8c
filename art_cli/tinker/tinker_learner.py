"""TinkerLearner: the Learner with weights on a Tinker server.

    groups -> samples, built like in other learners -> numbers per token -> forward_backward, optim_step on the server

Credit, masks, means, the schedule and gradient clipping are computed here. The server's loss is a plain sum
(tinker_losses.py), and a step equals the torch learner's step. A checkpoint directory contains the server's paths to
the saved weights (remote.json).

No update is applied twice (tinker_trainer.py). After a failed step, the weights are reset to the last checkpoint.

RemoteSft is supervised warm-up with the server's cross_entropy, available on every Tinker server. Weights and optimizer
stay on the server; `sft/` in a checkpoint directory contains the running sums and the path of the saved weights.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from art_cli.config.schema import AlgorithmConfig, LoraConfig, SftConfig, TinkerEngineConfig
from art_cli.engines.proof import make_probe
from art_cli.learners import SFT_DIRECTORY, Learner, LearnerSetup, Progress, SftProgress, StepMetrics
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.samples import Floats, Sample, bare_sample
from art_cli.learners.schedule import WINDOW, clip_limit, rate_of_step, warm_up_settings
from art_cli.learners.sft.examples import example_samples
from art_cli.learners.sft.sft_batches import Taken, plan_batches
from art_cli.learners.sft.sft_trainer import Sft
from art_cli.learners.step.policy_step import Pass, take_step
from art_cli.learners.step.step_samples import PlannedStep
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.learners.step.training_record import StepRecord
from art_cli.models.policy_spec import PolicySpec, tokenizer_of
from art_cli.models.tokenizer import configs_of, stop_ids
from art_cli.runs.durable import is_locked_here, write_lines
from art_cli.runs.manifest import Probe
from art_cli.runs.trajectory import LearnedTrajectory, ScoredTrajectory
from art_cli.runtime.errors import LearnerError
from art_cli.tinker.client.remote_checkpoint import TEMPLATE_FILE, read_remote, write_remote
from art_cli.tinker.tinker_losses import WeightedSample, server_loss, weigh
from art_cli.tinker.tinker_trainer import SHARES, RemoteTrainer, logprobs_of

log = logging.getLogger(__name__)

# Number of optimizer steps sent ahead of the server's answers, to keep the server busy.
AHEAD = 2


class _Update(NamedTuple):
    """An upcoming optimizer step."""

    samples: list[WeightedSample]
    # Passes, identical in each epoch: samples, data, server loss. Empty if the loss takes two passes, because the
    # second pass depends on results of the first.
    requests: list[tuple[list[WeightedSample], list[Any], str]] = []


class _Sent(NamedTuple):
    """An optimizer step in flight: its samples, and each pass with its samples."""

    samples: list[WeightedSample]
    passes: list[tuple[list[WeightedSample], Any]]


class _Applied(NamedTuple):
    sent: _Sent
    limit: float  # gradient clipping norm
    future: Any  # future of the weight update


class _SentSft(NamedTuple):
    update: list[WeightedSample]
    answer: Any  # future of the pass
    applied: Any  # future of the optimizer step


class RemoteSft(Sft):
    ahead = 3  # small updates need a deeper queue to keep the server busy

    def __init__(
        self,
        trainer: RemoteTrainer,
        examples: Sequence[dict[str, Any]],
        evaluated: Sequence[dict[str, Any]],
        config: SftConfig,
        *,
        seed: int,
        tokenizer: Any,
        limits: Mapping[str, Any],
    ) -> None:
        """`limits` are max_length, vocabulary and stops. Raises LearnerError for missing or invalid examples."""
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
        """Resets the optimizer if the weights were trained before."""
        if self.trainer.saved is not None:
            self.trainer.restart_from(self.trainer.saved.state)

    def _send(self, samples: Sequence[Sample], index: int) -> _SentSft:
        update = weigh(samples, Algorithm(), None, mean_over="trained")
        data = [self.trainer.datum(each.sample, weights=each.imitation) for each in update]
        answer = self.trainer.client.forward_backward(data, "cross_entropy")
        rate = rate_of_step(self.settings, index)
        return _SentSft(update, answer, self.trainer.submit_update(self.settings, rate, clip_limit(self.settings, ())))

    def _finish(self, sent: _SentSft) -> Taken:
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


def _samples(example: dict[str, Any], tokenizer: Any, name: str, limits: Mapping[str, Any]) -> list[Sample]:
    """Raises LearnerError if the example is unusable for training."""
    samples = example_samples(example, tokenizer, name=name, **limits)
    for sample in samples:
        if (sample.temperatures != 1).any():
            raise LearnerError(
                f"{sample.trajectory_id}: sampled at another temperature than 1, and a server of the Tinker protocol "
                "computes logprobs at 1 only; leave it out"
            )
    return samples


class TinkerLearner(Learner):
    """The Learner for `learner: tinker`. Failures may also raise RemoteError."""

    def __init__(
        self, policy: PolicySpec, setup: LearnerSetup, *, engine: TinkerEngineConfig, lora: LoraConfig | None
    ) -> None:
        """Raises RemoteError if the server's key is missing."""
        train, loss = setup.train, setup.loss
        assert not isinstance(loss, AlgorithmConfig), (
            "a server computes no loss of a user; the configuration was checked"
        )
        self.policy, self.train_config, self.loss, self.sft_config = policy, train, loss, setup.sft
        self.algorithm = build_algorithm(loss, max_tokens=setup.sampling_max_tokens, directory=setup.directory)
        self.server_loss = server_loss(loss)
        self.trainer = RemoteTrainer(engine, lora, base=policy.base, seed=train.seed)
        self.warm_up: RemoteSft | None = None  # set between begin_sft and end_sft
        self._is_shared = False  # the next checkpoint is a warm-up result that other runs may start from
        self._learned: list[LearnedTrajectory] = []  # records of the last step, until written
        if lora is not None and "alpha" in lora.model_fields_set:
            log.warning(
                "model.lora.alpha: the server sets the scale of an adapter, so this key has no effect; "
                "art backend CONFIG takes the value in its file"
            )

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes a policy step; after a failure the weights are the last checkpoint's. Raises LearnerError."""
        metrics, self._learned = take_step(
            groups, self, algorithm=self.algorithm, loss=self.loss, train=self.train_config, progress=progress
        )
        return metrics

    def write_learned(self, path: Path) -> None:
        learned, self._learned = self._learned, []
        write_lines(path, learned)

    # --- the calls of policy_step.py ----------------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        return AHEAD if self.train_config.clip_to_history is None else 1  # clipping needs the norms of previous steps

    @contextlib.contextmanager
    def taking(self, plan: PlannedStep) -> Iterator[float]:
        for sample in (sample for part in plan.parts for sample in part):
            if others := sample.temperatures[sample.temperatures != 1].tolist():
                raise LearnerError(
                    f"trajectory {sample.trajectory_id}: sampled at temperature {others[0]:g}, and a server of the "
                    "Tinker protocol computes logprobs at 1 only: rollout.sampling.temperature=1, and "
                    "rollout.sampling.force=true where the agent sets its own"
                )
        assert self.trainer.client is not None  # a saved client restores the number of steps
        try:
            yield self._rate
        except BaseException:
            self.trainer.drop()
            raise
        counters = self.trainer.counters
        self.trainer.counters = counters._replace(num_steps=counters.num_steps + 1)

    @property
    def _rate(self) -> float:
        return rate_of_step(self.train_config, self.trainer.counters.num_steps)

    def plan(self, samples: Sequence[Sample], finished: FinishedCounts) -> _Update:
        return _Update(weigh(samples, self.algorithm, finished, mean_over=self.loss.mean_over))

    def count(self, update: _Update, statistics: StepStatistics) -> int:
        samples = [each.sample for each in update.samples]
        statistics.add_counts(samples, num_computed=sum(len(sample.token_ids) for sample in samples))
        return 1

    def forward(self, update: _Update, at: Pass, *, is_first: bool) -> _Update:
        samples = update.samples
        if any(each.is_unknown for each in samples):
            found = self.trainer.forward([each.sample for each in samples])
            samples = [each.with_old(logprobs) for each, logprobs in zip(samples, found, strict=True)]
        datum, requests = self.trainer.datum, []
        if self.server_loss.name is None:
            return _Update(samples)
        if in_policy := [each for each in samples if each.in_policy.any()]:
            data = [datum(each.sample, **self._numbers_of(each)) for each in in_policy]
            requests.append((in_policy, data, self.server_loss.name))
        if imitated := [each for each in samples if not np.isnan(each.imitation).all()]:
            data = [datum(each.sample, weights=each.imitation) for each in imitated]
            requests.append((imitated, data, "cross_entropy"))
        return _Update(samples, requests)

    def backward(self, update: _Update, at: Pass) -> _Sent:
        sent = self._send(update)
        if at.number == 0:  # compare with the engine's logprobs before applying the gradient
            for each, new in zip(sent.samples, self._logprobs(sent), strict=True):
                sample = each.sample
                if sample.trajectory_id not in at.statistics.older:
                    gaps = np.abs(np.where(np.isnan(sample.logprobs), sample.raw_logprobs, sample.logprobs) - new)
                    at.statistics.logprob_gap.add(gaps[~np.isnan(gaps)])
        return sent

    def apply(self, sent: _Sent, at: Pass) -> _Applied:
        limit = clip_limit(self.train_config, self.trainer.counters.norms)
        return _Applied(sent, limit, self.trainer.submit_update(self.train_config, self._rate, limit))

    def finish(self, applied: _Applied, at: Pass) -> bool:
        self._add_numbers(applied.sent.samples, self._logprobs(applied.sent), at)
        norm = self.trainer.wait_for_update(applied.future)
        if math.isnan(norm):
            if self.train_config.clip_to_history is not None:
                raise LearnerError(
                    f"train.clip_to_history: {self.trainer.server.url} does not report the norm of a gradient; set it "
                    "to null"
                )
        else:
            counters = self.trainer.counters
            self.trainer.counters = counters._replace(norms=(*counters.norms, norm)[-WINDOW:])
        at.statistics.grad_norms.append(norm)
        at.statistics.grad_clips.append(min(norm, applied.limit))
        at.advance()
        return True

    def gather(self, statistics: StepStatistics, record: StepRecord | None) -> tuple[StepStatistics, StepRecord | None]:
        return statistics, record

    def _add_numbers(self, samples: Sequence[WeightedSample], logprobs: Sequence[Floats], at: Pass) -> None:
        """Adds an optimizer step's losses, computed from the server's logprobs."""
        total = 0.0
        for each, new in zip(samples, logprobs, strict=True):
            inside, is_imitated, lost = each.in_policy, ~np.isnan(each.imitation), 0.0
            if inside.any():
                found = self.server_loss.values(new[inside], each.old[inside], each.advantages[inside])
                lost += math.fsum(found.values)
                at.statistics.clip_fraction.add(found.is_clipped)
            if is_imitated.any():
                lost -= math.fsum(each.imitation[is_imitated] * new[is_imitated])
                at.statistics.cross_entropy.add(-new[is_imitated])
            total += lost
            if at.record is not None:
                at.record.note_learned(each.sample, new, loss=lost, update=at.number)
        at.statistics.losses.append(total)

    def _numbers_of(self, each: WeightedSample) -> dict[str, Floats]:
        """Returns the values for a sample's policy tokens. The share is separate if the server supports it."""
        if not self.trainer.takes_shares:
            return {"advantages": each.advantages, "logprobs": each.old}
        shares = np.full(len(each.old), each.share)
        return {"advantages": each.sample.advantages, "logprobs": each.old, SHARES: shares}

    def _send(self, update: _Update) -> _Sent:
        """Makes the server accumulate the update's gradient."""
        if self.server_loss.name is None:
            new = self.trainer.forward([each.sample for each in update.samples])
            return _Sent(update.samples, [(update.samples, self._send_slopes(update.samples, new))])
        forward_backward, settings = self.trainer.client.forward_backward, self.server_loss.settings
        passes = [
            (part, forward_backward(data, loss, settings if loss == self.server_loss.name else None))
            for part, data, loss in update.requests
        ]
        return _Sent(update.samples, passes)

    def _send_slopes(self, update: list[WeightedSample], new: list[Floats]) -> Any:
        """Sends the second of two passes: loss derivatives by logprob, as cross_entropy weights."""
        data = []
        for each, logprobs in zip(update, new, strict=True):
            weights, inside = np.nan_to_num(each.imitation), each.in_policy
            if inside.any():
                found = self.server_loss.values(logprobs[inside], each.old[inside], each.advantages[inside])
                weights[inside] -= found.slopes
            data.append(self.trainer.datum(each.sample, weights=weights))
        return self.trainer.client.forward_backward(data, "cross_entropy")

    def _logprobs(self, sent: _Sent) -> list[Floats]:
        """Returns [N] logprobs of each sample's targets, computed with the weights used for the gradient."""
        by_sample: dict[int, Floats] = {}
        for part, future in sent.passes:
            answer = self.trainer.wait(future, "forward_backward")
            for each, logprobs in zip(part, logprobs_of(answer, [each.sample for each in part]), strict=True):
                by_sample[id(each)] = logprobs
        return [by_sample[id(each)] for each in sent.samples]

    # --- the warm-up --------------------------------------------------------------------------------------------------

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        """Returns the number of optimizer steps. Raises LearnerError for missing or invalid examples."""
        assert self.sft_config is not None, "sft needs an sft section"
        tokenizer = tokenizer_of(self.policy)
        self.warm_up = RemoteSft(
            self.trainer,
            examples,
            evaluated,
            self.sft_config,
            seed=self.train_config.seed,
            tokenizer=tokenizer,
            limits={
                "max_length": self.policy.max_length,
                "vocabulary": self.policy.vocabulary,
                "stops": stop_ids(tokenizer, *configs_of(self.policy.base)),
            },
        )
        return self.warm_up.batches.num_updates

    def take_sft(self, num_updates: int, *, progress: Progress | None = None) -> SftProgress:
        assert self.warm_up is not None, "begin_sft comes first"
        try:
            return self.warm_up.take(num_updates)
        except BaseException:
            self.trainer.drop()
            raise

    def end_sft(self) -> None:
        warm_up, self.warm_up = self.warm_up, None
        if warm_up is not None and warm_up.sums.num_updates:
            self.trainer.restart_from(self.trainer.save_state())
            self._is_shared = True

    # --- other methods of the protocol --------------------------------------------------------------------------------

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns [L - 1] logprobs of tokens after the first. Raises LearnerError unless temperature is 0 or 1."""
        if temperature not in (0.0, 1.0):
            raise LearnerError(f"a server of the Tinker protocol has no logprobs at temperature {temperature:g}")
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2:
            return []
        [found] = self.trainer.forward([bare_sample(ids, np.arange(1, len(ids)), "probe")])
        return [float(value) for value in found]

    def measure(self, before: Probe | None = None) -> Probe:
        """Returns a probe with random tokens. It has no measured rounding, because the protocol only scores."""
        tokens = make_probe(self.policy.vocabulary) if before is None else before.tokens
        return Probe(tokens=tokens, logprobs=self.score(tokens))

    def save(self, directory: Path) -> None:
        """Saves the state and sampler weights on the server, and writes their paths."""
        write_remote(directory, self.trainer.save())
        if self.warm_up is not None:
            self.warm_up.save(directory)
        if not self._is_shared:  # other runs may start from a finished warm-up and must not unload this run's adapter
            self.trainer.lease(directory.parent)
        self._is_shared = False
        if self.policy.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.policy.chat_template, encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Continues from a saved checkpoint on any machine. Raises CheckpointError without remote.json."""
        self._is_shared = False
        self.trainer.drop()
        saved = read_remote(directory)
        if is_locked_here(directory.parent.parent):  # otherwise another process may be using this adapter
            self.trainer.end_lease(directory.parent)
        self.trainer.go_on_from(saved)
        if self.warm_up is not None and (directory / SFT_DIRECTORY).is_dir():
            self.warm_up.load(directory)

    def start(self) -> None:
        """Does nothing, because the server is already running."""

    def check(self) -> None:
        """Does nothing, because waiting for a lost server ends by itself."""

    def close(self) -> None:
        self.trainer.close()
