"""The Learner protocol: the owner of the weights, which updates them; the metrics of a step; the table of built-ins.

    scored groups -> credit (algorithms/) -> samples.py -> packs/packing.py -> objective, share (algorithms/) -> a
    gradient

    torch_learner.py     weights in this process; step/ takes the policy step, optimizer.py applies it
    processes/           the same learner in several processes, on one machine or more
    sft/, teachers/      the warm-up; models that give their logprobs of what the policy sampled
    prompt/              the learner whose policy is a prompt

A learner speaks in plain data (records, paths, numbers). Its methods block; the loop calls them in a thread.
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

# `unsloth` takes the same step on weights that Unsloth loads (unsloth.py)
BUILT_INS = {
    **dict.fromkeys(("torch", "unsloth"), "art_cli.learners.torch_learner:TorchLearner"),
    "prompt": "art_cli.learners.prompt.prompt_learner:PromptLearner",
    "tinker": "art_cli.tinker.tinker_learner:TinkerLearner",
}

Progress = Callable[[int, int], None]  # (number done, total), counted in packs of a step or optimizer steps of an sft

SFT_DIRECTORY = "sft"  # directory in a checkpoint with the state of an unfinished warm-up


class StepMetrics(msgspec.Struct, kw_only=True):
    """The metrics of one step. Counts are of the whole step; shares in [0, 1]; logprobs and entropy in nats per token.

    In a step without signal, num_updates is 0 and every number that needs a forward pass is NaN. `known` leaves NaN
    out.
    """

    reward_mean: float
    reward_std: float
    no_signal_share: float  # share of groups whose rewards do not differ by more than 1e-8
    num_groups: int
    num_samples: int
    num_trajectories: int
    num_failed: int  # trajectories with an error, which are not trained on
    num_updates: int  # optimizer steps taken
    tokens_trained: int  # tokens with a weight in the loss
    tokens_flat: int  # number of tokens in one row per sample
    tokens_computed: int  # number of tokens in the packs, which hold every shared token once
    tokens_imitated: int = 0  # trained tokens in cross_entropy: with loss.echo, the environment's answers
    # share of replies whose state another reply of their group answered too; NaN: the algorithm compares no states
    shared_states: float = float("nan")
    packed: float = float("nan")  # 1: samples ran as packs; 0: packs did not hold, so one sample ran at a time
    loss: float = float("nan")
    cross_entropy: float = float("nan")  # mean -log p of the tokens imitated; NaN: there are none
    teacher_kl: float = float("nan")  # log student - log teacher, mean over sampled tokens: KL(student || teacher)
    taught_share: float = float("nan")  # share of finished trajectories that the teacher scored
    kl: float = float("nan")  # k3 estimate against the reference policy; NaN: not computed
    # KL(before the step || now) by k3 of the tokens that loss.kl_cov holds, mean over updates; NaN: there are none
    kl_cov: float = float("nan")
    entropy: float = float("nan")
    entropy_coefficient: float = float("nan")  # reward of a nat of entropy in this step; NaN: no loss.entropy_floor
    clip_fraction: float = float("nan")
    # mean |logprob now - logprob that sampled| at the updates after a step's first; NaN: there was one update
    logprob_change: float = float("nan")
    off_policy_masked: float = float("nan")  # share of policy tokens that loss.off_policy left out; NaN: not set
    grad_norm: float = float("nan")  # before clipping, mean over updates
    grad_clip: float = float("nan")  # after clipping, mean over updates
    learning_rate: float = float("nan")
    update_kl: float = float("nan")  # KL(before the step || after it) by k3; NaN: train.max_kl does not ask for it
    update_share: float = float("nan")  # share of the last update that was kept; below 1: it passed train.max_kl
    logprob_gap: float = float("nan")  # mean |engine - learner| over trained tokens, before the first update
    logprob_gap_max: float = float("nan")
    value_loss: float = float("nan")  # mean clipped squared error of the critic's values; NaN: there is no critic
    value_mean: float = float("nan")  # mean of the critic's values before the step
    explained_variance: float = float("nan")  # 1 - Var(return - value) / Var(return), before the step
    peak_gb: float = float("nan")  # largest memory of the learner's GPU during the step; NaN: it has none
    train_s: float = 0.0

    def known(self) -> dict[str, float]:
        """Returns the numbers by name, without those that are NaN."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if not math.isnan(value)}


class SftProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a warm-up. Example: SftProgress(num_updates=40, is_done=False, numbers={"loss": 0.61})"""

    num_updates: int  # optimizer steps taken so far
    is_done: bool  # all are taken, or the evaluation loss stopped it
    numbers: dict[str, float]  # means over all optimizer steps so far; `loss` covers the last epoch alone


@dataclass(frozen=True)
class LearnerSetup:
    """The settings of a learner that trains weights, which is made as `Class(policy, setup)`."""

    train: "TrainConfig"
    loss: "LossConfig | AlgorithmConfig"
    learner: "LearnerConfig"  # the learner's own section of the configuration
    sft: "SftConfig | None" = None  # or None if there is no warm-up
    sampling_max_tokens: int = 1024  # length limit of one reply
    directory: Path = Path()  # the path of a user's algorithm is relative to it

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
    """Updates the policy. Failures raise LearnerError, CheckpointError or DriftError.

    The built-in learners are subclasses and inherit the members with a default.
    """

    payer: "Payer | None" = None
    """Counts the cost of the calls that the learner makes, or None if it makes none."""

    def arrange(self, plans: list["RolloutPlan"]) -> list["RolloutPlan"]:
        """Returns a step's rollouts, each with the prompt that the learner gives it. By default they have none."""
        return plans

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        """Takes one policy step on the scored trajectories of whole groups. Groups without signal change no weight."""

    def rehearse(self, num_tokens: int) -> float | None:
        """Runs a forward and a backward pass over made-up rows of that length, as many as a pack holds.

        Weights, optimizer and random state do not change. Returns the peak of memory in GB, or None if the system does
        not report it. The weights must be on this machine. Raises OutOfMemory.
        """

    def write_learned(self, path: Path) -> None:
        """Writes a LearnedTrajectory for each trajectory of the last step, as a whole file of JSON lines.

        Call it once after a step, and only with `train.record_learned`.
        """

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        """Returns the number of optimizer steps of a supervised warm-up, which this call prepares.

        Examples are chat transcripts `{"messages": [...], "tools": [...]}`, trained on the assistant's tokens, or
        attempts `{"id": ..., "scenario": ..., "turns": [...]}`, trained on the sampled tokens. The loss is measured on
        `evaluated`. The warm-up has a separate optimizer; `save` and `load` include its state until
        `end_sft`.
        """

    def take_sft(self, num_updates: int, *, progress: Progress | None = None) -> SftProgress:
        """Takes at most `num_updates` more optimizer steps, with the evaluations that are due between them.

        `progress` is called for each pack too, with the optimizer steps that are done by then.
        """

    def end_sft(self) -> None:
        """Frees what the warm-up needed. The weights stay as they are."""

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Returns [L - 1] logprobs in nats of each token after the first."""

    def measure(self, before: Probe | None = None) -> Probe:
        """Returns a probe of the weights as they are now, on the text of `before`, an earlier one of the same base."""

    def save(self, directory: Path) -> None:
        """Writes adapter, tokenizer, optimizer and RNG into a checkpoint directory. The caller writes the manifest."""

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote. The next step is bit-identical to one without the interruption."""

    def start(self) -> None:
        """Starts the learner's own processes and waits for its other nodes. Without it the first call does so."""

    def check(self) -> None:
        """Raises LearnerError if a process of the learner is dead. Does not block; any thread may call it."""

    def close(self) -> None:
        """Ends the learner's own processes. No method may be called after it."""


def load_policy(config: "RunConfig", base: str) -> "Weights":
    """Returns the starting policy, loaded as the configured learner needs it. `base` is a hub id or a directory."""
    from art_cli.models.loading import load_weights

    load = None
    if config.learner.name == "unsloth":
        load = resolve_name("art_cli.learners.unsloth:load_model")
    return load_weights(config.model, base, device=config.learner.device, seed=config.train.seed, load=load)


def make_learner(
    config: "RunConfig", policy: "Weights | PolicySpec | None", *, directory: Path = Path(), logs: Path | None = None
) -> Learner:
    """Returns the configured learner on the policy's weights. Worker processes load the base themselves.

    The policy is None if the engine brings its model: then a prompt is learned.

    A user's algorithm is relative to `directory`. Worker processes write their logs to `logs`, or to a temporary
    directory if `logs` is None.
    """
    from art_cli.config.schema import with_base_model
    from art_cli.models.policy_spec import PolicySpec, spec_of

    make = resolve_name(BUILT_INS[config.learner.name])
    if not config.learner.trains_weights:
        searching: Learner = make(config, directory)
        return searching
    assert policy is not None, "weights can be trained only if they are here"
    setup = LearnerSetup.of(config, directory)
    if config.learner.weights == "server":
        spec = policy if isinstance(policy, PolicySpec) else spec_of(policy)
        remote: Learner = make(spec, setup, engine=with_base_model(config), lora=config.model.lora)
        return remote
    if has_own_weights(config):
        make_job = resolve_name("art_cli.learners.processes.job:make_job")
        parallel = resolve_name("art_cli.learners.processes.workers:parallel_learner")
        spec = policy if isinstance(policy, PolicySpec) else spec_of(policy)
        learner: Learner = parallel(make_job(config, spec.base, directory=directory, dtype=spec.dtype), logs=logs)
        return learner
    learner = make(policy, setup)
    return learner


def has_own_weights(config: "RunConfig") -> bool:
    """Returns True if the learner keeps its weights elsewhere: weights in this process never change."""
    return config.learner.weights != "here"


def describe_processes(config: "RunConfig") -> str:
    """Describes the worker processes of a learner. Example: "2 processes of its own", or "2 nodes x 4 processes"."""
    learner = config.learner
    each = f"{learner.processes} process{'' if learner.processes == 1 else 'es'}"
    return f"{learner.nodes} nodes x {each}" if learner.nodes > 1 else f"{each} of its own"
