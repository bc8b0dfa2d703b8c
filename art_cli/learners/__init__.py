"""What owns the weights and updates them: the Learner protocol, what a step reports, and the table of built-ins.

    scored groups -> credit (algorithms/) -> samples.py -> packing.py -> objective, share (algorithms/) -> a gradient

A learner speaks in plain data (records, paths, numbers). Its methods block; the loop calls them in a thread.
"""

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from art_cli.errors import LearnerError
from art_cli.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.config.schema import RunConfig
    from art_cli.model import Weights
    from art_cli.policy_spec import PolicySpec

# Unsloth's is the same step on weights that it loads itself (unsloth.py)
BUILT_INS = dict.fromkeys(("torch", "unsloth"), "art_cli.learners.torch_learner:TorchLearner")

Progress = Callable[[int, int], None]  # (done, of): packs of the step, or optimizer steps of an sft


class StepMetrics(msgspec.Struct, kw_only=True):
    """What one step did. Counts are of the whole step; shares are in [0, 1]; logprobs and entropy in nats per token.

    A step without signal has num_updates 0 and no number that would need a forward pass (those are NaN, left out of
    metrics.jsonl).
    """

    reward_mean: float
    reward_std: float
    no_signal_share: float  # groups whose rewards are equal to 1e-8, of all complete groups
    num_groups: int
    num_samples: int
    num_trajectories: int
    num_failed: int  # trajectories with an error: counted, not trained on
    num_updates: int  # optimizer steps taken
    tokens_trained: int  # sampled tokens that carry a loss term
    tokens_flat: int  # what one row per sample would compute
    tokens_computed: int  # what the packs compute: every shared token once
    packed: float = float("nan")  # 1: samples ran as packs; 0: packs did not hold, so one sample ran at a time
    loss: float = float("nan")
    kl: float = float("nan")  # k3 estimate against the reference policy; NaN where it is not computed
    entropy: float = float("nan")
    clip_fraction: float = float("nan")
    grad_norm: float = float("nan")  # before clipping, mean over updates
    learning_rate: float = float("nan")
    logprob_gap: float = float("nan")  # mean |engine - learner| over trained tokens, before the first update
    logprob_gap_max: float = float("nan")
    train_s: float = 0.0

    def known(self) -> dict[str, float]:
        """The numbers by name, without those that are NaN."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if not math.isnan(value)}


class Learner(Protocol):
    """Updates the policy. Failures raise LearnerError, CheckpointError or DriftError."""

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """One policy update on the scored trajectories of whole groups. Groups without signal change no weight."""

    def sft(self, demos: Sequence[dict[str, Any]], *, progress: Progress | None = None) -> dict[str, float]:
        """Supervised warm-up on chat transcripts `{"messages": [...], "tools": [...]}`, assistant tokens only.

        The next three in one go: with an optimizer of its own; `loss` is the last epoch's.
        """

    def begin_sft(self, demos: Sequence[dict[str, Any]]) -> int:
        """Prepares a supervised warm-up; how many optimizer steps it has. `save` and `load` take its state too."""

    def take_sft(self, num_updates: int, *, progress: Progress | None = None) -> dict[str, float]:
        """At most so many of the optimizer steps that are left; the numbers of all until now."""

    def end_sft(self) -> None:
        """Lets go of what the warm-up needed; the weights stay as they are."""

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[L - 1] logprobs in nats of each token after the first."""

    def save(self, directory: Path) -> None:
        """Fills a checkpoint directory: adapter, tokenizer, optimizer, RNG. The manifest is not its business."""

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote: the next step is bit-identical to an undisturbed one."""

    def check(self) -> None:
        """Raises LearnerError once a process that it needs is dead. Does not block; any thread may call it."""

    def close(self) -> None:
        """Lets go of processes of its own. No method may be called after it."""


def load_policy(config: "RunConfig", base: str) -> "Weights":
    """The starting policy as the configured learner needs it; `base` is a hub id or directory.

    Raises LearnerError: `learner: auto`, not resolved.
    """
    from art_cli import model

    _check_resolved(config)
    load = None
    if config.learner.name == "unsloth":
        load = import_module("art_cli.learners.unsloth").load_model
    return model.load_weights(config.model, base, device=config.learner.device, seed=config.train.seed, load=load)


def make_learner(
    config: "RunConfig", policy: "Weights | PolicySpec", *, directory: Path = Path(), logs: Path | None = None
) -> Learner:
    """The learner a configuration names, on the policy's weights; with processes of its own, on their base.

    A user's algorithm is relative to `directory`. Processes of its own write their logs to `logs`; None: nowhere that
    stays. Raises LearnerError: `learner: auto`, not resolved.
    """
    from art_cli.policy_spec import PolicySpec, spec_of

    _check_resolved(config)
    knobs: dict[str, Any] = {
        "train": config.train,
        "loss": config.learns_by,
        "directory": directory.resolve(),
        "learner": config.learner,
        "sft": config.sft,
        "sampling_max_tokens": config.rollout.sampling.max_tokens,
    }
    if has_own_weights(config):
        make = import_module("art_cli.learners.parallel").parallel_learner
        spec = policy if isinstance(policy, PolicySpec) else spec_of(policy)
        model = config.model.model_copy(update={"dtype": spec.dtype})  # the same in all processes
        learner: Learner = make(base=spec.base, model=model, logs=logs, **knobs)
        return learner
    module, _, name = BUILT_INS[config.learner.name].partition(":")
    learner = getattr(import_module(module), name)(policy, **knobs)
    return learner


def _check_resolved(config: "RunConfig") -> None:
    if config.learner.name not in BUILT_INS:
        name = config.learner.name
        raise LearnerError(f"learner {name} is not resolved; loop.auto.resolve_auto says which learner that is")


def has_own_weights(config: "RunConfig") -> bool:
    """Whether the learner keeps its weights in processes of its own, so that those here stay as they were loaded."""
    return getattr(config.learner, "processes", 1) > 1
