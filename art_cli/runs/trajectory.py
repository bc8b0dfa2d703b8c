"""The records of a run: Turn, Trajectory, Score, RewardNoise, AskedAgain, ScoredTrajectory, LearnedTrajectory,
GroupRewards.

They are plain data: no torch, no files, no network. The gateway makes trajectories, judges score them, the learner
makes samples of them and records what it learned. `run_dir` writes and reads them as JSON lines.

Tokens form a prefix tree. A turn stores only what it adds: which earlier turn it continues (`parent`), how many tokens
of that turn's sequence it keeps (`kept`), the prompt tokens after those, and the sampled tokens:

    turn 0   parent None  kept 0   prompt [1 2 3]  sampled [4 5]          sequence  1 2 3 4 5
    turn 1   parent 0     kept 5   prompt [6]      sampled [7]            sequence  1 2 3 4 5 6 7     continues turn 0
    turn 2   parent 1     kept 3   prompt [8]      sampled [9]            sequence  1 2 3 8 9         a branch
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from art_cli.runtime.state_key import MAX_LENGTH

SCHEMA_VERSION = 1
EQUAL_REWARDS = 1e-8  # rewards this close carry no signal: what is left between them is rounding, not preference

Json = dict[str, Any]
MAX_GROUP_SIZE = 1_000_000  # most attempts of one group; a larger number in a file is a mistake
MAX_TOKEN_ID = 2**31 - 1  # largest token id that any model has
# The values of the sampled tokens of one turn: one number for all of them; or one for each, None where the token has
# none; or None, if no token of the turn has one.
PerToken = float | list[float | None] | None
LeftOut = Literal["failed", "no_tokens", "no_signal", "unreliable", "algorithm", "max_kl"]


def as_saved(scenario: Json) -> Json:
    """Returns a scenario as it is read from a file, whatever tuples and numbers a function made it of."""
    saved: Json = msgspec.json.decode(msgspec.json.encode(scenario))
    return saved


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: prompt tokens, sampled tokens, their logprobs. L tokens sampled.

    Example: Turn(parent=None, kept=0, prompt_ids=[1, 2, 3], sampled_ids=[4, 5], logprobs=[-0.1, -0.7],
                  raw_logprobs=[-0.1, -0.7], step=3, temperature=1.0, finish_reason="stop")
    """

    parent: int | None  # index of the turn that this one continues, or None if it starts a tree
    kept: int  # number of leading tokens of the parent's sequence that the prompt begins with
    prompt_ids: list[int]  # the rest of the prompt, after the kept tokens
    sampled_ids: list[int]  # [L] sampled tokens, the stop token included
    # [L] logprobs in nats under the distribution sampled from (temperature, top_p, top_k), but without the mask of a
    # grammar, because the learner knows no grammar and trains the policy without it.
    logprobs: list[float]
    raw_logprobs: list[float] | None  # [L] logprobs in nats under softmax(logits), or None if the engine reports none
    step: int  # step of the policy that sampled it
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    finish_reason: str = "stop"  # stop, length, tool_calls; cancelled: the rollout left the stream after these tokens
    is_masked: bool = False  # `logprobs` include a grammar's mask (vLLM reports no others), a penalty or a bias
    is_abandoned: bool = False  # the client gave up on the call and sent it again, so it never saw this reply
    asked: dict[str, float | None] | None = None  # sampling values of the client that the gateway replaced
    policy: str = ""  # digest of the proven weights that sampled it (runs/manifest.py), or "" if no one proved them
    # key of the environment's state in which the reply acts, or None if the prompt is the state
    state: Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)] | None = None

    @property
    def is_truncated_sampling(self) -> bool:
        """Whether it was sampled from a cut distribution or greedily, so that `logprobs` are not those of
        softmax(logits / temperature)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.temperature == 0.0 or self.is_masked


class Trajectory(msgspec.Struct, kw_only=True):
    """The record of one rollout.

    `messages` is the conversation the last call belongs to, its reply included; `branches` are the others (sub-agents,
    edited histories), each whole. A trajectory with `error` set is kept and counted, and never trained on.
    """

    schema_version: int = SCHEMA_VERSION
    id: str  # unique in the run
    group_id: str
    group_size: int
    index: int  # position in the group, 0 to group_size - 1
    step: int = 0  # training step that it was played for; each turn names the step of the policy that sampled it
    scenario: Json = {}
    messages: list[Json] = []
    branches: list[list[Json]] = []
    tools: list[Json] = []  # OpenAI tool definitions, each once
    turns: list[Turn] = []
    # Of each turn, the seconds after `started_at` at which the gateway had its request and its whole reply. Empty where
    # nothing measured them: an older version, an import, or the gateway of `art gateway`.
    spans: list[tuple[float, float]] = []
    metrics: dict[str, float] = {}
    metadata: Json = {}
    returned_reward: float | None = None  # reward that the rollout itself returned, or None
    error: str | None = None  # "kind: message"
    limit: str | None = None  # turn_limit or context_length_exceeded, the limit for which the last call was refused
    started_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    source: str | msgspec.UnsetType = msgspec.UNSET  # key of `rollout.sources`; no line of a run without them has it

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(f"turn {index} goes on from turn {turn.parent}, which is none before it")

    @property
    def scenario_id(self) -> str:
        """The id of its scenario; in a run with sources SOURCE/ID, as two of them may have the same ids."""
        id = str(self.scenario.get("id", self.group_id))
        return f"{self.source}/{id}" if self.source else id

    def reported(self, metric: str) -> float | None:
        """Returns a metric of the rollout, or None. Where a limit ended it before it could report any, its reward
        (`rollout.limit_reward`) stands for each."""
        value = self.metrics.get(metric)
        return self.returned_reward if value is None and self.limit is not None else value

    @property
    def is_silent(self) -> bool:
        """Whether no model call was recorded."""
        return not self.turns and not self.messages

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One judge's score of one trajectory.

    Example: Score(judge="ruler", model="openai/gpt-6.1-sol", score=0.8, explanation="one detour", votes=[0.75, 0.85])
    """

    judge: str
    score: float
    model: str | None = None  # the model that was asked
    model_returned: str | None = None  # the model that the replies named; several are joined by ", "
    explanation: str | None = None
    votes: list[float] = []  # each single vote, in the order of asking; empty: the score is the only vote
    spread: float | None = None  # standard deviation of the votes; None below two votes
    positions: list[int] = []  # position in each vote's prompt, the first is 0; empty: the judge shows no order
    cost_usd: float | None = None  # this trajectory's share of the group's cost, or None if unknown
    prompt_tokens: float | None = None  # this trajectory's share of the tokens that the group's calls read
    completion_tokens: float | None = None  # this trajectory's share of the tokens that they wrote
    latency_s: float | None = None  # mean duration of the group's votes, without the time spent in a queue
    settings: str | None = None  # digest of the judge's rubric and parameters; the same in a whole file


def score_names(scores: Sequence[Score]) -> list[str]:
    """Returns the judges' names, each once: of a panel with the models, and numbered where these are equal too.

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
    """The known errors in a judge's rewards: the flip rates of verdicts 0 and 1, or the variance of a score.

    Example: RewardNoise(false_positive=0.1, false_negative=0.2). What follows for a group is in
    `judges/reliability.py`.
    """

    false_positive: float | None = None  # P(verdict 1 | truth 0)
    false_negative: float | None = None  # P(verdict 0 | truth 1)
    # squared error of a score, against the mean of many more votes; the same in a whole group
    variance: float | None = None
    min_reliability: float = 0.0  # a group whose reliability is not above it is left out

    def __post_init__(self) -> None:
        """Raises ValueError: numbers that no judge can have."""
        rates = (self.false_positive, self.false_negative)
        known = [rate for rate in rates if rate is not None]
        if len(known) == 1 or not all(rate >= 0 for rate in known) or not sum(known) < 1:
            raise ValueError("flip rates come in pairs, are at least 0, and their sum is below 1")
        if (self.variance is None) == (not known) or not 0 <= (self.variance or 0.0) < math.inf:
            raise ValueError("noise is a pair of flip rates, or a finite variance of at least 0")
        if not 0 <= self.min_reliability <= 1:
            raise ValueError("min_reliability is from 0 to 1")


class Reliability(msgspec.Struct, frozen=True, kw_only=True):
    """The true part of a group's reward differences, by the known errors of its judge; the factor of its advantages.

    Example: Reliability(share=0.36, scaled=0.6)
    """

    share: float  # share of a difference between two rewards that is true, in [0, 1]; factor of a plain difference
    scaled: float  # factor of advantages that are divided by the group's standard deviation
    is_left_out: bool = False  # whether the share is not above the bound of the judge

    def factor(self, *, is_scaled: bool) -> float:
        """Returns the factor of the group's advantages; 0 leaves the group out."""
        return 0.0 if self.is_left_out else self.scaled if is_scaled else self.share


class AskedAgain(msgspec.Struct, frozen=True, kw_only=True):
    """The further rounds of votes on a group whose first votes may be noise.

    Example: AskedAgain(rounds=1, tokens=412.5, cost_usd=0.0003). Tokens and cost are one trajectory's share of what
    these rounds took; the scores' own numbers include them.
    """

    rounds: int  # rounds after the first, at least 1
    tokens: float = 0.0  # prompt and completion tokens
    cost_usd: float | None = None  # or None if unknown


class ScoredTrajectory(Trajectory, kw_only=True):
    """A trajectory, unchanged, with its final `reward` and the scores behind it.

    `reward` is None if the trajectory has an error; it is then counted and not trained on.
    """

    reward: float | None = None
    scores: list[Score] = []
    noise: RewardNoise | None = None  # or None if the judge's errors are unknown
    again: AskedAgain | None = None  # or None if its group was judged in one round
    shadow: list[Score] = []  # scores of shadow judges, by their names; never trained on
    # Reliability of its group among the groups of its step. No file has it, because it needs the whole step:
    # judges/reliability.py computes it. UNSET if the judge's errors are unknown, or the group's rewards are equal.
    reliability: Reliability | msgspec.UnsetType = msgspec.UNSET
    # Digest of the judge behind the reward: model, rubric, function, weights. `art judge` writes it, and continues a
    # file only under the same digest. It is None if a run or an older art wrote the line.
    judge_settings: str | None = None


class LearnedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a step of training computed of one of its trajectories, when it first trained on it.

    Example: LearnedTrajectory(id="s0003-g0002-1", num_tokens=2, advantages=[0.71, None],
                               logprobs=[[-0.12, -1.5], None], loss=-0.04, masked={"abandoned": 2})

    Lists have one entry per turn, for the turn's sampled tokens.
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    # Number of the step's optimizer step that trained on it first. 0: its numbers are those of the policy before the
    # step; above 0 (train.updates_per_step): those of the policy after that many updates.
    update: int = 0
    num_tokens: int = 0  # number of tokens with a weight in the loss, those of prompts included
    advantages: list[PerToken] = []  # weights in the policy's component of the loss, or None for a token outside
    # the learner's logprobs in nats under softmax(logits / temperature), or None for a token that is not trained
    logprobs: list[PerToken] = []
    reference: list[PerToken] | None = None  # logprobs under the reference policy, or None without loss.kl
    importance: list[PerToken] | None = None  # weights that loss.off_policy gave, or None without it
    loss: float = 0.0  # the sum that its tokens add to the loss of their optimizer step
    # Number of sampled tokens that do not move the policy, by reason. off_policy: loss.off_policy left them out;
    # clip_cov: loss.clip_cov set their advantage to 0; abandoned: the rollout never saw them; no_advantage: the
    # algorithm gave them none.
    masked: dict[str, int] = {}
    # Why no token of it was trained. no_tokens: it sampled none; no_signal: its group's rewards are equal; unreliable:
    # they may be its judge's errors; algorithm: the algorithm left it out; max_kl: train.max_kl ended the step before
    # its update. It is None if it was trained.
    left_out: LeftOut | None = None


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of one scored group, for later choices of scenarios.

    Example: GroupRewards(group_id="s0003-g0002", scenario="easy-17", pool="easy", rewards=[1.0, 0.0, 1.0, 1.0])
    """

    schema_version: int = SCHEMA_VERSION
    group_id: str
    scenario: str  # id
    pool: str  # the pool of the scenario; its id where `rollout.pool` names no key
    rewards: list[float]  # rewards of the attempts that have one
    source: str | msgspec.UnsetType = msgspec.UNSET  # as in Trajectory


class GroupMember(Protocol):
    """A row with its group and its position in the group."""

    @property
    def group_id(self) -> str: ...
    @property
    def index(self) -> int: ...


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
    again: AskedAgain | None = None,
) -> ScoredTrajectory:
    """Returns the trajectory as a ScoredTrajectory, all other fields unchanged."""
    fields = {name: getattr(trajectory, name) for name in Trajectory.__struct_fields__}
    return ScoredTrajectory(
        **fields, reward=reward, scores=list(scores), judge_settings=settings, noise=noise, again=again
    )


def has_signal(rewards: Sequence[float]) -> bool:
    """Returns True if the rewards of a group differ by more than 1e-8; an empty group has no signal."""
    assert all(map(math.isfinite, rewards)), f"rewards must be finite: {list(rewards)}"
    return len(rewards) > 0 and max(rewards) - min(rewards) > EQUAL_REWARDS


def sequence(turns: Sequence[Turn], index: int) -> list[int]:
    """Returns all token ids of turn `index`: its whole prompt, then its sampled tokens."""
    turn = turns[index]
    kept = sequence(turns, turn.parent)[: turn.kept] if turn.parent is not None else []
    return [*kept, *turn.prompt_ids, *turn.sampled_ids]


def prompt(turns: Sequence[Turn], index: int) -> list[int]:
    """Returns the token ids of the prompt of turn `index`, as the engine got them."""
    ids = sequence(turns, index)
    return ids[: len(ids) - len(turns[index].sampled_ids)]
