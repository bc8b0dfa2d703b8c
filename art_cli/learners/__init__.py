"""The Learner protocol (a learner owns and updates the policy), step metrics, and the table of built-in learners.

    scored groups -> credit (algorithms/) -> samples.py -> packs/packing.py -> objective, share (algorithms/) ->
    gradient

Learners exchange plain data (records, paths, numbers). Their methods block; the loop calls them in a thread.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from art_cli.runs.manifest import Probe
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.config.schema import AlgorithmConfig, LearnerConfig, LossConfig, RunConfig, SftConfig, TrainConfig
    from art_cli.judges.costs import Payer
    from art_cli.models.policy_spec import PolicySpec
    from art_cli.models.weights import Weights
    from art_cli.rollouts.rollout_runner import RolloutPlan

# `unsloth` uses the same class on weights loaded through Unsloth (unsloth.py)
BUILT_INS = {
    **dict.fromkeys(("torch", "unsloth"), "art_cli.learners.torch_learner:TorchLearner"),
    "prompt": "art_cli.learners.prompt.prompt_learner:PromptLearner",
    "tinker": "art_cli.tinker.tinker_learner:TinkerLearner",
}

Progress = Callable[[int, int], None]  # (number done, total): packs in a policy step, optimizer steps in an sft

SFT_DIRECTORY = "sft"  # checkpoint subdirectory for the state of an unfinished warm-up


class StepMetrics(msgspec.Struct, kw_only=True):
    """Metrics for one step. Counts cover the whole step; shares are in [0, 1]; logprobs and entropy in nats per token.

    In a step without signal, num_updates is 0 and every number that needs a forward pass is NaN. `known` omits NaN
    values.
    """

    reward_mean: float
    reward_std: float
    no_signal_share: float  # share of groups whose rewards differ by 1e-8 or less
    num_groups: int
    num_samples: int = 0
    num_trajectories: int
    num_failed: int  # trajectories with an error; they are not trained
    num_updates: int  # optimizer steps taken
    tokens_trained: int = 0  # tokens with a loss weight
    tokens_flat: int = 0  # token count with one row per sample
    tokens_computed: int = 0  # token count in the packs, where shared tokens appear once
    tokens_imitated: int = 0  # trained tokens in cross_entropy: with loss.echo, the environment's answers
    # share of replies whose state was answered by another reply in the same group; NaN: states are not compared
    shared_states: float = float("nan")
    packed: float = float("nan")  # 1: samples ran as packs; 0: packs failed the check, so samples ran one at a time
    loss: float = float("nan")
    cross_entropy: float = float("nan")  # mean -log p over imitated tokens; NaN without imitation
    teacher_kl: float = float("nan")  # log student - log teacher, mean over sampled tokens: KL(student || teacher)
    taught_share: float = float("nan")  # share of finished trajectories that the teacher scored
    kl: float = float("nan")  # k3 estimate against the reference policy; NaN: not computed
    entropy: float = float("nan")
    clip_fraction: float = float("nan")
    # mean |logprob now - logprob at sampling| over later updates in the step; NaN with a single update
    logprob_change: float = float("nan")
    off_policy_masked: float = float("nan")  # share of policy tokens dropped by loss.off_policy; NaN: not set
    grad_norm: float = float("nan")  # before clipping, mean over updates
    grad_clip: float = float("nan")  # after clipping, mean over updates
    learning_rate: float = float("nan")
    update_kl: float = float("nan")  # KL(before the step || after), binary; NaN without train.max_kl
    # share of the last update that was kept; below 1: the update exceeded train.max_kl
    update_share: float = float("nan")
    logprob_gap: float = float("nan")  # mean |engine - learner| over trained tokens, before the initial update
    logprob_gap_max: float = float("nan")
    value_loss: float = float("nan")  # mean clipped squared error of the critic's values; NaN without a critic
    value_mean: float = float("nan")  # mean critic value before the step
    explained_variance: float = float("nan")  # 1 - Var(return - value) / Var(return), before the step
    peak_gb: float = float("nan")  # peak GPU memory during the step; NaN on a CPU
    train_s: float = 0.0

    def known(self) -> dict[str, float]:
        """Returns the metrics by name, without NaN values."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if not math.isnan(value)}


class SftProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Warm-up progress. Example: SftProgress(num_updates=40, is_done=False, numbers={"loss": 0.61})"""

    num_updates: int  # optimizer steps taken so far
    is_done: bool  # all steps are taken, or the evaluation loss stopped the warm-up
    numbers: dict[str, float]  # means over all optimizer steps so far; `loss` covers the last epoch only


@dataclass(frozen=True)
class LearnerSetup:
    """Settings for a learner that trains weights, which is constructed as `Class(policy, setup)`."""

    train: "TrainConfig"
    loss: "LossConfig | AlgorithmConfig"
    learner: "LearnerConfig"  # the learner section of the configuration
    sft: "SftConfig | None" = None  # None without a warm-up
    sampling_max_tokens: int = 1024  # maximum tokens per reply
    directory: Path = Path()  # base directory for a user's algorithm path

    @classmethod
    def of(cls, config: "RunConfig", directory: Path) -> Self:
        return cls(
            train=config.train,
            loss=config.learns_by,
            learner=config.learner,
            sft=config.sft,
            sampling_max_tokens=config.rollout.sampling.max_tokens,
            directory=directory.resolve(),
        )


class Learner(Protocol):
    """Updates the policy. Raises LearnerError, CheckpointError or DriftError. Built-in learners inherit from it."""

    payer: "Payer | None" = None
    """Counts the cost of the learner's model calls; None for learners that make no calls."""

    def arrange(self, plans: list["RolloutPlan"]) -> list["RolloutPlan"]:
        """Returns a step's rollouts with the learner's prompts attached. The default adds no prompts."""
        return plans

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes one policy step on the scored trajectories of whole groups. Groups without signal change no weight."""

    def rehearse(self, num_tokens: int) -> float | None:
        """Runs forward and backward passes over made-up rows of this length, filling one pack.

        Weights, optimizer and random state do not change. Returns the peak memory in GB, or None when the system does
        not report it. The weights must be on this machine. Raises OutOfMemory.
        """

    def write_learned(self, path: Path) -> None:
        """Writes one LearnedTrajectory per trajectory in the last step, as a complete JSON-lines file.

        Call it once after a step, and only with `train.record_learned`.
        """

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        """Prepares a supervised warm-up and returns its number of optimizer steps.

        Examples are chat transcripts `{"messages": [...], "tools": [...]}`, trained on the assistant's tokens, or
        attempts `{"id": ..., "scenario": ..., "turns": [...]}`, trained on the sampled tokens. The evaluation loss is
        measured on `evaluated`. The warm-up has a separate optimizer, whose state `save` and `load` include until
        `end_sft`.
        """

    def take_sft(self, num_updates: int, *, progress: Progress | None = None) -> SftProgress:
        """Takes up to `num_updates` more optimizer steps and runs the evaluations due between them.

        `progress` is also called for each pack, with the number of completed optimizer steps.
        """

    def end_sft(self) -> None:
        """Frees the warm-up's resources. The weights stay as they are."""

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns [L - 1] logprobs in nats, for every token but the initial one."""

    def measure(self, before: Probe | None = None) -> Probe:
        """Returns a probe of the current weights, on the text of `before`, an earlier probe of the same base model."""

    def save(self, directory: Path) -> None:
        """Writes adapter, tokenizer, optimizer and RNG into a checkpoint directory. The caller writes the manifest."""

    def load(self, directory: Path) -> None:
        """Continues from a saved checkpoint. The next step is bit-identical to an uninterrupted run's next step."""

    def start(self) -> None:
        """Starts the learner's worker processes and waits for other nodes. If skipped, the next call does it."""

    def check(self) -> None:
        """Raises LearnerError if a worker process is dead. Does not block; any thread may call it."""

    def close(self) -> None:
        """Ends the worker processes. The learner cannot be used afterwards."""


def load_policy(config: "RunConfig", base: str) -> "Weights":
    """Returns the starting policy, loaded as the configured learner needs it. `base` is a hub id or directory."""
    from art_cli.models.loading import load_weights

    load = None
    if config.learner.name == "unsloth":
        load = resolve_name("art_cli.learners.unsloth:load_model")
    return load_weights(config.model, base, device=config.learner.device, seed=config.train.seed, load=load)


def make_learner(
    config: "RunConfig", policy: "Weights | PolicySpec | None", *, directory: Path = Path(), logs: Path | None = None
) -> Learner:
    """Returns the configured learner for the policy's weights. Worker processes load the base model themselves.

    `policy` may be None when the engine brings the model, because the learner then only searches for a prompt. The path
    to a user's algorithm is relative to `directory`. Worker processes write logs to `logs` (default: a temporary
    directory).
    """
    from art_cli.config.schema import with_base_model
    from art_cli.models.policy_spec import PolicySpec, spec_of

    make: Callable[..., Learner] = resolve_name(BUILT_INS[config.learner.name])
    if not config.learner.trains_weights:
        return make(config, directory)
    assert policy is not None, "weights can be trained only if they are here"
    setup = LearnerSetup.of(config, directory)
    if not has_own_weights(config):
        return make(policy, setup)
    spec = policy if isinstance(policy, PolicySpec) else spec_of(policy)
    if config.learner.weights == "server":
        return make(spec, setup, engine=with_base_model(config), lora=config.model.lora)
    make_job = resolve_name("art_cli.learners.processes.job:make_job")
    make_parallel: Callable[..., Learner] = resolve_name("art_cli.learners.processes.workers:parallel_learner")
    return make_parallel(make_job(config, spec.base, directory=directory, dtype=spec.dtype), logs=logs)


def has_own_weights(config: "RunConfig") -> bool:
    """Returns True if training happens outside this process, so the weights loaded here never change."""
    return config.learner.weights != "here"


def describe_processes(config: "RunConfig") -> str:
    """Describes a learner's worker processes. Example: "1 process of its own", or "2 nodes x 4 processes"."""
    learner = config.learner
    each = f"{learner.processes} process{'' if learner.processes == 1 else 'es'}"
    return f"{learner.nodes} nodes x {each}" if learner.nodes > 1 else f"{each} of its own"
