"""TorchLearner: updates the policy's weights with torch, in this process, sharing them with the engine.

    groups -> batch -> per optimizer step: packs -> per pack: scores -> loss -> backward -> clip -> AdamW

It decides nothing about rewards (judges) or when to step (the loop). It reads and writes a checkpoint directory: the
adapter and tokenizer as PEFT has them, the optimizer's state as safetensors and JSON.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import LossConfig, SftConfig, TorchLearnerConfig, TrainConfig
from art_cli.errors import DriftError, LearnerError
from art_cli.learners import Progress, StepMetrics
from art_cli.learners.batch import count, make_batch, split_batch
from art_cli.learners.demos import demo_samples
from art_cli.learners.logprobs import TokenScores
from art_cli.learners.losses import LossTerms, PackLoss, build_loss, pack_loss
from art_cli.learners.losses.importance import truncated_weights
from art_cli.learners.losses.means import Counts
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.pack_runner import PackRunner
from art_cli.learners.packing import Pack, pack_samples
from art_cli.learners.samples import Sample, bare_sample
from art_cli.learners.tally import Tally
from art_cli.model import Weights, load_checkpoint, save_weights

log = logging.getLogger(__name__)

RNG_FILE = "rng.safetensors"
# Tokens of a pack where the config leaves it open. 24M-parameter Qwen3 on two cores, 9,728 tokens a step: 8192 takes
# 17.4 s of CPU time, 2048 12.4 s, 1024 11.7 s: past the caches, time goes into fetching fresh memory.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}


class Update(NamedTuple):
    """One optimizer step to come: its packs, its counts, and what the weights before the step say of each pack."""

    packs: list[Pack]
    counts: Counts
    before: list[Tensor | None]  # [N] logprobs of each pack's terms at the step's first weights; None: at its own pass


class TorchLearner:
    def __init__(
        self,
        weights: Weights,
        *,
        train: TrainConfig,
        loss: LossConfig,
        learner: TorchLearnerConfig,
        sft: SftConfig | None = None,
        sampling_max_tokens: int = 1024,
    ) -> None:
        """`sampling_max_tokens`: of one reply. Raises LearnerError: a KL term without an adapter to switch off."""
        if loss.kl > 0 and not weights.has_adapter:
            raise LearnerError("loss.kl needs a reference policy, the model without its adapter: set model.lora")
        self.weights = weights
        self.train_config, self.loss_config, self.config, self.sft_config = train, loss, learner, sft
        self.max_tokens = sampling_max_tokens
        self.micro_batch_tokens = learner.micro_batch_tokens or MICRO_BATCH_TOKENS.get(weights.device.type, 2048)
        self.loss = build_loss(loss, max_tokens=sampling_max_tokens)
        self.runner = PackRunner(weights, gradient_checkpointing=learner.gradient_checkpointing)
        self.parameters = {name: p for name, p in weights.model.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(
            self.parameters,
            learning_rate=train.learning_rate,
            warmup_steps=train.warmup_steps,
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
        )

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[Sequence[Any]], *, progress: Progress | None = None) -> StepMetrics:
        """One policy update. On any failure every weight is what it was.

        Raises LearnerError (a loss that is not finite, memory that does not suffice) and DriftError (contract 2).
        """
        begin = time.perf_counter()
        batch = make_batch(groups, loss=self.loss_config, max_tokens=self.max_tokens)
        parts = split_batch(batch.groups, self.train_config.updates_per_step)
        tally = Tally()
        learning_rate = self.optimizer.current_rate()
        if parts:
            with self._changing_weights(parts[0][0]):
                self._take_updates([self._plan(part) for part in parts], tally, progress)
                self.optimizer.counts.num_steps += 1
        return tally.metrics(batch, learning_rate=learning_rate, train_s=time.perf_counter() - begin)

    def _plan(self, samples: list[Sample]) -> Update:
        packs = self._pack(samples)
        return Update(packs, count(samples), [None] * len(packs))

    def _take_updates(self, updates: list[Update], tally: Tally, progress: Progress | None) -> None:
        snapshot = self.optimizer.snapshot() if len(updates) > 1 else None
        num_packs = sum(len(update.packs) for update in updates)
        num_done = 0
        try:
            updates = [updates[0], *(self._look_ahead(update, tally) for update in updates[1:])]
            for index, update in enumerate(updates):
                tally.losses.append(0.0)
                for pack, before in zip(update.packs, update.before, strict=True):
                    self._backward(pack, update.counts, before, tally, is_first=index == 0)
                    num_done += 1
                    if progress is not None:
                        progress(num_done, num_packs)
                if index == 0:
                    self._check_drift(tally)
                self._apply(update, tally)
        except BaseException:
            if snapshot is not None:
                self.optimizer.restore(snapshot)
            raise

    def _look_ahead(self, update: Update, tally: Tally) -> Update:
        """The update with its packs' logprobs at the step's first weights, where the loss will need them."""
        if self.loss_config.importance_cap is None and not any(np.isnan(p.terms.logprobs).any() for p in update.packs):
            return update
        before: list[Tensor | None] = []
        with torch.no_grad():
            for pack in update.packs:
                scores = self.runner.run(pack)
                tally.add_gap(scores, pack.terms)
                before.append(scores.logprobs[self._tensor(pack.terms.edges)])
        return update._replace(before=before)

    def _backward(self, pack: Pack, counts: Counts, before: Tensor | None, tally: Tally, *, is_first: bool) -> None:
        """Adds the pack's part of the gradient, and of what is reported."""
        reference = self._reference(pack)
        scores = self.runner.run(pack)
        if is_first:
            tally.add_gap(scores, pack.terms)
        loss = self._loss(pack, scores, counts, before, reference)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        tally.add_pack(pack, scores, loss)

    def _reference(self, pack: Pack) -> Tensor | None:
        """[N] logprobs of the pack's terms under the model without its adapter; None where there is no KL term."""
        if self.loss_config.kl == 0:
            return None
        with torch.no_grad(), self.weights.adapter_off():
            return self.runner.run(pack).logprobs[self._tensor(pack.terms.edges)]

    def _loss(
        self, pack: Pack, scores: TokenScores, counts: Counts, before: Tensor | None, reference: Tensor | None
    ) -> PackLoss:
        """The pack's part of the update's loss. Raises LearnerError with the trajectory whose loss is not finite."""
        new = scores.logprobs[self._tensor(pack.terms.edges)]
        before = new.detach() if before is None else before
        engine = self._tensor(pack.terms.logprobs).float()
        cap = self.loss_config.importance_cap
        terms = LossTerms(
            new=new,
            # what sampled, as the engine said it; as the learner sees it where the engine's is not comparable, or
            # where the difference between the two is corrected for
            old=torch.where(engine.isnan(), before, engine) if cap is None else before,
            advantages=self._tensor(pack.terms.advantages).float(),
            samples=self._tensor(pack.terms.samples),
            shares=self._shares(pack, counts),
            importance=None if cap is None else truncated_weights(before, engine, cap=cap),
            reference=reference,
        )
        loss = pack_loss(self.loss.objective, terms, kl=self.loss_config.kl)
        if not loss.parts.isfinite().all():
            sample = pack.samples[int(pack.terms.samples[int((~loss.parts.isfinite()).nonzero()[0])])]
            raise LearnerError(_not_finite("loss", sample))
        return loss

    def _shares(self, pack: Pack, counts: Counts) -> Tensor:
        shares = np.array([self.loss.share(len(sample.targets), counts) for sample in pack.samples])
        return self._tensor(shares[pack.terms.samples]).float()

    def _check_drift(self, tally: Tally) -> None:
        bound = self.train_config.max_logprob_gap
        if tally.gap.mean > bound:
            raise DriftError(
                f"engine and learner differ by {tally.gap.mean:.3g} nats per token on average (at most "
                f"{tally.gap.max:.3g}), over train.max_logprob_gap = {bound:g}: they do not hold the same weights"
            )

    def _apply(self, update: Update, tally: Tally) -> None:
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            self.optimizer.clear()
            raise LearnerError(self._blame(update))
        self.optimizer.update()
        tally.grad_norms.append(norm)

    def _blame(self, update: Update) -> str:
        """Which sample's gradient is not finite, found by taking each alone."""
        for pack, before in zip(update.packs, update.before, strict=True):
            for index, sample in enumerate(pack.samples):
                [alone] = self._pack([sample])
                own = None if before is None else before[self._tensor(pack.terms.samples) == index]
                self._backward(alone, update.counts, own, _scratch(), is_first=False)
                norm = self.optimizer.clip()
                self.optimizer.clear()
                if not math.isfinite(norm):
                    return _not_finite("gradient", sample)
        return "the gradient of the step is not finite, though each sample's alone is; lower train.learning_rate"

    # --- sft ----------------------------------------------------------------------------------------------------------

    def sft(self, demos: Sequence[dict[str, Any]], *, progress: Progress | None = None) -> dict[str, float]:
        """Supervised warm-up on chat transcripts, with an optimizer of its own; `loss` is the last epoch's.

        The loss of an optimizer step is the mean of -log p over its assistant tokens. Raises LearnerError: no demos, or
        one that cannot be trained on.
        """
        config = self.sft_config
        assert config is not None, "sft needs an sft section"
        begin = time.perf_counter()
        transcripts = [
            demo_samples(demo, self.weights.tokenizer, name=f"demo {index + 1}", max_length=self.weights.max_length)
            for index, demo in enumerate(demos)
        ]
        if not transcripts:
            raise LearnerError("sft.demos: no transcripts")
        optimizer = Optimizer(
            self.parameters,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        batches = _shuffled_batches(transcripts, config, seed=self.train_config.seed)
        losses, grad_norms, computed, trained = [], [], 0, 0
        with self._changing_weights(transcripts[0][0]):
            for done, samples in enumerate(batches, 1):
                packs = self._pack(samples)
                losses.append(self._sft_backward(packs, count(samples)))
                grad_norms.append(optimizer.clip())
                if not math.isfinite(grad_norms[-1]):
                    raise LearnerError(f"sft: the gradient of optimizer step {done} is not finite")
                optimizer.counts.num_steps += 1
                optimizer.update()
                computed += sum(len(pack.token_ids) for pack in packs)
                trained += count(samples).tokens
                if progress is not None:
                    progress(done, len(batches))
        last_epoch = losses[-(len(batches) // config.epochs) :]
        return {
            "loss": sum(last_epoch) / len(last_epoch),
            "loss_first": losses[0],
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "num_updates": float(len(batches)),
            "num_demos": float(len(transcripts)),
            "tokens_trained": float(trained),
            "tokens_computed": float(computed),
            "train_s": time.perf_counter() - begin,
        }

    def _sft_backward(self, packs: list[Pack], counts: Counts) -> float:
        total = 0.0
        for pack in packs:
            logprobs = self.runner.run(pack).logprobs[self._tensor(pack.terms.edges)]
            loss = -logprobs.sum() / counts.tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    # --- the rest of the protocol -------------------------------------------------------------------------------------

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[L - 1] logprobs in nats of each token after the first; temperature 0 is taken as 1."""
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2:
            return []
        sample = bare_sample(ids, np.arange(1, len(ids)), "probe", temperature=temperature or 1.0)
        with self._running(sample), torch.no_grad():
            [pack] = self._pack([sample])
            logprobs = self.runner.run(pack).logprobs[self._tensor(pack.terms.edges)]
        scores: list[float] = logprobs.tolist()
        return scores

    def save(self, directory: Path) -> None:
        with self.weights.lock:
            save_weights(self.weights, directory)
            self.optimizer.save(directory)
            save_file(_rng_state(), directory / RNG_FILE)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError: no weights there, or of another model. Weights alone start a new optimizer."""
        with self.weights.lock:
            load_checkpoint(self.weights, directory)
            if (directory / RNG_FILE).is_file():
                self.optimizer.load(directory)
                _set_rng_state(load_file(directory / RNG_FILE))
            else:
                log.info("%s: weights without optimizer state; the optimizer starts anew", directory)

    # --- shared by all ------------------------------------------------------------------------------------------------

    def _pack(self, samples: Sequence[Sample]) -> list[Pack]:
        share = self.config.packing == "tree" and bool(self.runner.can_pack)
        return pack_samples(samples, budget=self.micro_batch_tokens, share=share)

    @contextlib.contextmanager
    def _running(self, sample: Sample) -> Iterator[None]:
        """Holds the weights and runs packs; running out of memory becomes a LearnerError that says what to do."""
        try:
            self.runner.settle(sample)
            with self.runner.running():
                yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise LearnerError(
                f"out of memory; lower learner.micro_batch_tokens (now {self.micro_batch_tokens}) or set "
                "learner.gradient_checkpointing=true"
            ) from error

    @contextlib.contextmanager
    def _changing_weights(self, sample: Sample) -> Iterator[None]:
        """As `_running`; whoever caches what the weights computed learns that they moved, gradients are gone after."""
        with self._running(sample):
            try:
                yield
            finally:
                self.optimizer.clear()
                self.weights.version += 1

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)


def _not_finite(what: str, sample: Sample) -> str:
    return (
        f"trajectory {sample.trajectory_id}, turn {sample.turn}: its {what} is not finite; no weight was changed. "
        "Lower train.learning_rate, or look at that trajectory's logprobs"
    )


def _scratch() -> Tally:
    tally = Tally()
    tally.losses.append(0.0)
    return tally


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _shuffled_batches(transcripts: list[list[Sample]], config: SftConfig, *, seed: int) -> list[list[Sample]]:
    """The samples of each optimizer step, epoch after epoch, each epoch in an order of its own."""
    batches = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(transcripts))
        for start in range(0, len(order), config.batch_size):
            chosen = order[start : start + config.batch_size]
            batches.append([sample for index in chosen for sample in transcripts[index]])
    return batches


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
