"""The records that flow through a run: Turn, Trajectory, Score, ScoredTrajectory.

Plain data, without torch, files or network. The gateway makes trajectories, judges make scored ones, the learner makes
samples of them. Written and read as JSON lines by `run_dir`.

Tokens form a prefix tree. A turn stores only what it adds: which earlier turn it goes on from (`parent`), how many
tokens of that turn's sequence it keeps (`kept`), the prompt tokens after those, and what was sampled:

    turn 0   parent None  kept 0   prompt [1 2 3]  sampled [4 5]          sequence  1 2 3 4 5
    turn 1   parent 0     kept 5   prompt [6]      sampled [7]            sequence  1 2 3 4 5 6 7     continues turn 0
    turn 2   parent 1     kept 3   prompt [8]      sampled [9]            sequence  1 2 3 8 9         a branch
"""

from collections.abc import Sequence
from typing import Any

import msgspec

SCHEMA_VERSION = 1

Json = dict[str, Any]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: prompt tokens, sampled tokens, their logprobs. L tokens sampled.

    Example: Turn(parent=None, kept=0, prompt_ids=[1, 2, 3], sampled_ids=[4, 5], logprobs=[-0.1, -0.7],
                  raw_logprobs=[-0.1, -0.7], step=3, temperature=1.0, finish_reason="stop")
    """

    parent: int | None  # index of the turn this one goes on from; None: starts a tree of its own
    kept: int  # how many tokens of the parent's sequence the prompt begins with
    prompt_ids: list[int]  # the prompt after those
    sampled_ids: list[int]  # [L] as sampled, the stop token included
    logprobs: list[float]  # [L] nats, under the distribution really sampled from (temperature, top_p, top_k), without
    # the mask of a grammar that held the reply to a format: the learner knows none, and trains the policy without it
    raw_logprobs: list[float] | None  # [L] nats, under softmax(logits) untouched; None: the engine did not say
    step: int  # the policy's step that sampled
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    finish_reason: str = (
        "stop"  # stop, length, tool_calls; cancelled: the rollout left the stream, and saw no more than this
    )
    is_masked: bool = False  # the mask is in `logprobs` all the same: vLLM tells no others
    is_abandoned: bool = False  # the client had given up on the call and sent it again: it never saw this reply
    asked: dict[str, float | None] | None = None  # what the client asked for and rollout.sampling.force replaced

    @property
    def is_truncated_sampling(self) -> bool:
        """Sampled from a cut distribution (or greedily): `logprobs` are then not softmax(logits / temperature)."""
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
    index: int  # its place in the group, 0 .. group_size - 1
    step: int = 0  # of training; each turn says which step's policy sampled it
    scenario: Json = {}
    messages: list[Json] = []
    branches: list[list[Json]] = []
    tools: list[Json] = []  # OpenAI tool definitions, each once
    turns: list[Turn] = []
    metrics: dict[str, float] = {}
    metadata: Json = {}
    returned_reward: float | None = None  # what the rollout itself returned
    error: str | None = None  # "kind: message"
    limit: str | None = None  # turn_limit or context_length_exceeded, where the last call was refused for it
    started_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            if turn.parent is not None and not 0 <= turn.parent < index:
                raise ValueError(f"turn {index} goes on from turn {turn.parent}, which is none before it")

    @property
    def is_silent(self) -> bool:
        """No model call was recorded."""
        return not self.turns and not self.messages

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one judge says of one trajectory.

    Example: Score(judge="ruler", model="openai/o3", score=0.8, explanation="one detour", votes=[0.75, 0.85])
    """

    judge: str
    score: float
    model: str | None = None
    explanation: str | None = None
    votes: list[float] = []  # each single vote, in the order asked; empty: the score is the only vote
    spread: float | None = None  # standard deviation of the votes; None below two votes
    positions: list[int] = []  # where each vote's prompt showed it, 0 first; empty: the judge has no order
    cost_usd: float | None = None  # this trajectory's share of the group's cost; None: unknown
    prompt_tokens: float | None = None  # its share of what the group's calls read
    completion_tokens: float | None = None  # and of what they wrote
    latency_s: float | None = None  # mean of the group's votes, waiting for a place left out
    settings: str | None = None  # digest of what the judge was told (rubric, parameters): one file, one digest


class ScoredTrajectory(Trajectory, kw_only=True):
    """A trajectory, everything of it unchanged, with the final `reward` and the scores it was made of.

    `reward` is None where the trajectory has an error: it is counted and not trained on.
    """

    reward: float | None = None
    scores: list[Score] = []
    judge_settings: str | None = (
        None  # digest of the judge that gave the reward: model, rubric, function, weights, ...;
    )
    # `art judge` writes it, and goes on with a file only under the same one. None: written by a run or an older art


def score_trajectory(
    trajectory: Trajectory, reward: float | None, scores: Sequence[Score] = (), *, settings: str | None = None
) -> ScoredTrajectory:
    """The trajectory as a ScoredTrajectory; everything else is carried over as it is."""
    fields = {name: getattr(trajectory, name) for name in Trajectory.__struct_fields__}
    return ScoredTrajectory(**fields, reward=reward, scores=list(scores), judge_settings=settings)


def sequence(turns: Sequence[Turn], index: int) -> list[int]:
    """All token ids of turn `index`: its whole prompt, then what it sampled."""
    turn = turns[index]
    kept = sequence(turns, turn.parent)[: turn.kept] if turn.parent is not None else []
    return [*kept, *turn.prompt_ids, *turn.sampled_ids]


def prompt(turns: Sequence[Turn], index: int) -> list[int]:
    """The token ids the engine was given for turn `index`."""
    ids = sequence(turns, index)
    return ids[: len(ids) - len(turns[index].sampled_ids)]
