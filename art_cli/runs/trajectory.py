"""A run's records: Turn, Trajectory, Score, RewardNoise, ScoredTrajectory, LearnedTrajectory, GroupRewards.

Plain data without torch, files or network. The gateway records trajectories, judges score them, and the learner turns
them into samples and records what it learned. `run_dir` reads and writes them as JSON lines.

Tokens form a prefix tree. A turn stores only new tokens: the earlier turn it continues (`parent`), how many tokens of
the parent's sequence it keeps (`kept`), the remaining prompt tokens, and the sampled tokens:

    turn 0   parent None  kept 0   prompt [1 2 3]  sampled [4 5]          sequence  1 2 3 4 5
    turn 1   parent 0     kept 5   prompt [6]      sampled [7]            sequence  1 2 3 4 5 6 7     continues turn 0
    turn 2   parent 1     kept 3   prompt [8]      sampled [9]            sequence  1 2 3 8 9         a branch
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from art_cli.chat.requests import MIN_TEMPERATURE
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runtime.state_key import MAX_LENGTH

SCHEMA_VERSION = 1
EQUAL_REWARDS = 1e-8  # smaller reward differences are rounding errors, not signal

Json = dict[str, Any]
MAX_GROUP_SIZE = 1_000_000  # maximum attempts per group; larger numbers in a file are mistakes
MAX_TOKEN_ID = 2**31 - 1  # largest possible token id of any model
# Values for a turn's sampled tokens: a single number for all tokens, or a list (None for a token without a value).
# None means no token has a value.
PerToken = float | list[float | None] | None
LeftOut = Literal["failed", "no_tokens", "no_signal", "unreliable", "algorithm", "max_kl"]


def as_saved(scenario: Json) -> Json:
    """Returns a scenario in the form that a file would give back (lists for tuples, and so on)."""
    saved: Json = msgspec.json.decode(msgspec.json.encode(scenario))
    return saved


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: prompt tokens, sampled tokens, their logprobs. L tokens sampled.

    Example: Turn(parent=None, kept=0, prompt_ids=[1, 2, 3], sampled_ids=[4, 5], logprobs=[-0.1, -0.7],
                  raw_logprobs=[-0.1, -0.7], step=3, temperature=1.0, finish_reason="stop")
    """

    parent: int | None  # index of the continued turn; None at the root of a tree
    kept: int  # number of leading tokens shared with the parent's sequence
    prompt_ids: list[int]  # remaining prompt tokens
    sampled_ids: list[int]  # [L] sampled tokens including the stop token
    # [L] logprobs in nats under the sampling distribution (temperature, top_p, top_k), ignoring any grammar mask. The
    # learner trains the policy without a grammar.
    logprobs: list[float]
    # [L] logprobs in nats under softmax(logits); None if not reported
    raw_logprobs: list[float] | None
    step: int  # policy step at sampling time
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    # stop, length, tool_calls or cancelled (the rollout closed the stream after these tokens)
    finish_reason: str = "stop"
    is_masked: bool = False  # `logprobs` include a grammar mask (vLLM always does this), a penalty or a bias
    is_abandoned: bool = False  # the client gave up on this call and sent it again, so it never saw the reply
    asked: dict[str, float | None] | None = None  # the client's sampling values that the gateway replaced
    policy: str = ""  # digest of the proven weights that sampled the turn (runs/manifest.py); "" if unproven
    # key of the environment state that the reply acts on; None if the prompt is the state
    state: Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a temperature that cannot divide logits; 0 is greedy."""
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_NUMBER:
            bounds = f"{MIN_TEMPERATURE:g} to {MAX_NUMBER:g}"
            raise ValueError(f"temperature {self.temperature:g} is neither 0 (greedy) nor in {bounds}")

    @property
    def is_truncated_sampling(self) -> bool:
        """True if sampling was truncated or greedy, so `logprobs` differ from log softmax(logits / temperature)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.temperature == 0.0 or self.is_masked


class Trajectory(msgspec.Struct, kw_only=True):
    """A rollout's record.

    `messages` is the conversation of the last call, including its reply. `branches` are other conversations
    (sub-agents, edited histories), each complete. Trajectories with `error` are kept and counted, but never trained on.
    """

    schema_version: int = SCHEMA_VERSION
    id: str  # unique in the run
    group_id: str
    group_size: int
    index: int  # position in the group, 0 to group_size - 1
    step: int = 0  # training step that uses the trajectory; turns record their policy steps separately
    scenario: Json = {}
    messages: list[Json] = []
    branches: list[list[Json]] = []
    tools: list[Json] = []  # OpenAI tool definitions, each once
    turns: list[Turn] = []
    # For each turn, when the gateway received the request and the complete reply, in seconds after `started_at`. Empty
    # if not measured (older versions, imports, `art gateway`).
    spans: list[tuple[float, float]] = []
    metrics: dict[str, float] = {}
    metadata: Json = {}
    returned_reward: float | None = None  # the rollout's own reward
    error: str | None = None  # "kind: message"
    limit: str | None = None  # the limit that refused the last call: turn_limit or context_length_exceeded
    failure: str | msgspec.UnsetType = msgspec.UNSET  # "kind: message" of the policy's own failure, which is scored
    started_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    source: str | msgspec.UnsetType = msgspec.UNSET  # key of `rollout.sources`; absent in runs without sources

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(f"turn {index} continues turn {turn.parent}, which is not an earlier turn")

    @property
    def scenario_id(self) -> str:
        """The scenario's id. Runs with sources use SOURCE/ID, because two sources may share ids."""
        id = str(self.scenario.get("id", self.group_id))
        return f"{self.source}/{id}" if self.source else id

    def reported(self, metric: str) -> float | None:
        """Returns a rollout metric. If a limit or the policy's failure ended the rollout before it reported metrics,
        returns its reward (`rollout.limit_reward`) instead."""
        value = self.metrics.get(metric)
        return self.returned_reward if value is None and self.ended_by else value

    @property
    def ended_by(self) -> str | None:
        """Returns the limit or the policy's own failure that ended the rollout, if any."""
        return self.limit or self.failure or None

    @property
    def is_silent(self) -> bool:
        """True if no model call was recorded."""
        return not self.turns and not self.messages

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's score for one trajectory.

    Example: Score(judge="ruler", model="openai/gpt-6.1-sol", score=0.8, explanation="one detour", votes=[0.75, 0.85])
    """

    judge: str
    score: float
    model: str | None = None  # the requested model
    model_returned: str | None = None  # the model named in the replies; several are joined by ", "
    explanation: str | None = None
    votes: list[float] = []  # single votes in request order; empty if the score is the only vote
    spread: float | None = None  # standard deviation over votes; None below two votes
    positions: list[int] = []  # position in each vote's prompt, starting at 0; empty if the judge shows no order
    cost_usd: float | None = None  # this trajectory's share of the group's cost; None if unknown
    prompt_tokens: float | None = None  # this trajectory's share of the group's prompt tokens
    completion_tokens: float | None = None  # this trajectory's share of the group's completion tokens
    latency_s: float | None = None  # mean duration of the group's votes, excluding time spent in a queue
    settings: str | None = None  # digest of the judge's rubric and parameters; constant within a file


def score_names(scores: Sequence[Score]) -> list[str]:
    """Returns unique judge names. Panels add model names, and numbers for repeated models.

    Example: ["ruler openai/gpt-6.1-sol", "ruler openai/gpt-6.1-sol (2)", "exact"]
    """
    judges, seen, found = [score.judge for score in scores], Counter[tuple[str, str | None]](), list[str]()
    for score in scores:
        seen[score.judge, score.model] += 1
        name = score.judge if judges.count(score.judge) == 1 else f"{score.judge} {score.model or ''}".rstrip()
        number = seen[score.judge, score.model]
        found.append(name if number == 1 else f"{name} ({number})")
    return found


class RewardNoise(msgspec.Struct, frozen=True, kw_only=True):
    """Known errors of a judge's rewards: flip rates for verdicts 0 and 1, or a score variance.

    Example: RewardNoise(false_positive=0.1, false_negative=0.2). `judges/reliability.py` computes the consequences for
    groups.
    """

    false_positive: float | None = None  # P(verdict 1 | truth 0)
    false_negative: float | None = None  # P(verdict 0 | truth 1)
    # squared error of a score against the mean of many more votes; equal for all scores in a group
    variance: float | None = None
    min_reliability: float = 0.0  # groups are skipped unless their reliability exceeds this bound

    def __post_init__(self) -> None:
        """Raises ValueError for impossible numbers."""
        rates = (self.false_positive, self.false_negative)
        known = [rate for rate in rates if rate is not None]
        if len(known) == 1 or not all(rate >= 0 for rate in known) or not sum(known) < 1:
            raise ValueError("flip rates come in pairs, are at least 0, and their sum is below 1")
        if (self.variance is None) == (not known) or not 0 <= (self.variance or 0.0) < math.inf:
            raise ValueError("noise is a pair of flip rates, or a finite variance of at least 0")
        if not 0 <= self.min_reliability <= 1:
            raise ValueError("min_reliability is from 0 to 1")


class Reliability(msgspec.Struct, frozen=True, kw_only=True):
    """The true share of a group's reward differences, given the judge's known errors. Scales the group's advantages.

    Example: Reliability(share=0.36, scaled=0.6)
    """

    share: float  # true share of a reward difference, in [0, 1]; factor for plain differences
    scaled: float  # factor for advantages divided by the group's standard deviation
    is_left_out: bool = False  # True if the share does not exceed the judge's bound

    def factor(self, *, is_scaled: bool) -> float:
        """Returns the factor for the group's advantages. 0 skips the group."""
        return 0.0 if self.is_left_out else self.scaled if is_scaled else self.share


class ScoredTrajectory(Trajectory, kw_only=True):
    """A trajectory with its final `reward` and all scores. An attempt with an error has None and is not trained on."""

    reward: float | None = None
    scores: list[Score] = []
    noise: RewardNoise | None = None  # None if the judge's errors are unknown
    shadow: list[Score] = []  # scores from shadow judges, by judge name; never trained on
    # The group's reliability among all groups of its step. Not saved, because judges/reliability.py needs the whole
    # step to compute it. UNSET if the judge's errors are unknown or the group's rewards are equal.
    reliability: Reliability | msgspec.UnsetType = msgspec.UNSET
    # Digest of the reward's judge: model, rubric, function, weights. Written by `art judge`, which continues a file
    # only under an equal digest. None in lines written by a run or an older art.
    judge_settings: str | None = None


class LearnedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers computed when a training step first used a trajectory.

    Example: LearnedTrajectory(id="s0003-g0002-1", num_tokens=2, advantages=[0.71, None],
                               logprobs=[[-0.12, -1.5], None], loss=-0.04, masked={"abandoned": 2})

    Lists have one entry per turn, for the turn's sampled tokens.
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    # Index of the optimizer step that first trained on the trajectory. With 0, the numbers refer to the policy before
    # the training step; with k > 0 (train.updates_per_step), to the policy after k updates.
    update: int = 0
    num_tokens: int = 0  # number of tokens with a loss weight, including prompt tokens
    advantages: list[PerToken] = []  # weights in the policy component of the loss; None for tokens outside it
    # learner logprobs in nats under softmax(logits / temperature); None for untrained tokens
    logprobs: list[PerToken] = []
    reference: list[PerToken] | None = None  # logprobs under the reference policy; None without loss.kl
    importance: list[PerToken] | None = None  # weights from loss.off_policy; None without it
    loss: float = 0.0  # contribution of these tokens to their optimizer step's loss
    # Number of sampled tokens that do not affect the policy, by reason. off_policy: dropped by loss.off_policy;
    # abandoned: the rollout never saw them; no_advantage: no advantage from the algorithm.
    masked: dict[str, int] = {}
    # Reason why no token was trained; None if trained. no_tokens: nothing was sampled; no_signal: equal rewards in the
    # group; unreliable: the rewards may be judge errors; algorithm: dropped by the algorithm; max_kl: train.max_kl
    # stopped the step first.
    left_out: LeftOut | None = None


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of a scored group, used by later steps to choose scenarios.

    Example: GroupRewards(group_id="s0003-g0002", scenario="easy-17", pool="easy", rewards=[1.0, 0.0, 1.0, 1.0])
    """

    schema_version: int = SCHEMA_VERSION
    group_id: str
    scenario: str  # id
    pool: str  # the scenario's pool; without `rollout.pool`, the scenario's id
    rewards: list[float]  # rewards of attempts with a reward
    source: str | msgspec.UnsetType = msgspec.UNSET  # same as in Trajectory


class GroupMember(Protocol):
    """A row with its group and its position in the group."""

    group_id: str
    index: int


AnyMember = TypeVar("AnyMember", bound=GroupMember)


def by_group(rows: Iterable[AnyMember]) -> dict[str, list[AnyMember]]:
    """Returns the rows of each group by group id, sorted by index. The last row with an index counts."""
    groups: dict[str, dict[int, AnyMember]] = defaultdict(dict)
    for row in rows:
        groups[row.group_id][row.index] = row
    return {group_id: [members[index] for index in sorted(members)] for group_id, members in groups.items()}


def score_trajectory(
    trajectory: Trajectory,
    reward: float | None,
    scores: Sequence[Score] = (),
    *,
    settings: str | None = None,
    noise: RewardNoise | None = None,
) -> ScoredTrajectory:
    """Returns the trajectory as a ScoredTrajectory with all other fields unchanged."""
    fields = {name: getattr(trajectory, name) for name in Trajectory.__struct_fields__}
    return ScoredTrajectory(**fields, reward=reward, scores=list(scores), judge_settings=settings, noise=noise)


def has_signal(rewards: Sequence[float]) -> bool:
    """Returns True if rewards in a group differ by more than 1e-8. An empty group has no signal."""
    assert all(map(math.isfinite, rewards)), f"rewards must be finite: {list(rewards)}"
    return len(rewards) > 0 and max(rewards) - min(rewards) > EQUAL_REWARDS


def sequence(turns: Sequence[Turn], index: int) -> list[int]:
    """Returns all token ids of turn `index`: the full prompt followed by the sampled tokens."""
    path = [turns[index]]  # from the turn to its root
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    ids: list[int] = []
    for turn in reversed(path):
        ids[turn.kept :] = [*turn.prompt_ids, *turn.sampled_ids]
    return ids


def prompt(turns: Sequence[Turn], index: int) -> list[int]:
    """Returns the prompt token ids of turn `index`, exactly as sent to the engine."""
    ids = sequence(turns, index)
    return ids[: len(ids) - len(turns[index].sampled_ids)]
