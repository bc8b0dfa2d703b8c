"""The `rollout` section: the agent, its scenarios, sampling and limits."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from art_cli.config.sections.base_config import (
    MAX_COUNT,
    MAX_PROCESSES,
    Count,
    Float,
    Int,
    NonNegative,
    PositiveInt,
    Seconds,
    Section,
)
from art_cli.config.sections.cluster_config import RayClusterConfig, VariableNames
from art_cli.config.sections.scenarios_config import Scenarios

MAX_REFILL = 100.0  # further groups per group of the plan


class SamplingConfig(Section):
    """Defaults for model calls that do not set these themselves; with `force`, the values for all calls."""

    temperature: NonNegative = 1.0
    """What the logits are divided by. 0: the likeliest token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """The probability of the smallest set of likeliest tokens to sample from. 1: all."""
    top_k: Count = 0
    """The number of likeliest tokens to sample from. 0: all."""
    max_tokens: PositiveInt = 1024
    """The largest number of tokens of one reply. A call may set another one; in Anthropic's protocol, where every call
    sets one, only a smaller one."""
    force: bool = False
    """true: these temperature, top_p and top_k, and art's own seeds, replace what a call sets. The turn records what
    the call asked for. A call with a penalty, `logit_bias` or `min_tokens` is refused."""


class ReplayConfig(Section):
    """Training again on groups of earlier steps, with importance weights."""

    share: Annotated[Float, Field(gt=0, lt=1)] = 0.25
    """The share of a step's groups that are groups with signal of earlier steps, so that fewer are played."""
    max_age: PositiveInt = 8
    """The largest number of steps since such a group was played."""


class EnvironmentConfig(Section):
    """A ready-made environment, which is the agent and the scenarios."""

    name: str
    """LIBRARY/NAME, such as reasoning_gym/countdown. `art environments` lists them."""
    args: dict[str, JsonValue] = {}
    """The environment's own settings, such as its difficulty, by its own names. `art init --environment` writes them
    with their defaults."""
    system: str | None = None
    """The system message of each conversation; "" is none. null: the library's own, if it has one."""
    size: PositiveInt = 1000
    """The number of scenarios. Each is a seed."""
    seed: Annotated[Int, Field(ge=0, le=MAX_COUNT)] = 0
    """The seed of the first scenario. The others follow it."""


class RolloutConfig(Section):
    """The user's agent, the scenarios, and how many attempts are made at once and in each step."""

    entry: str | None = None
    """The rollout as "file.py:function": `async def rollout(policy, scenario)`, or a plain `def`."""
    python: Path | None = None
    """The Python that runs the function, 3.11 or newer, or the directory of its environment (.venv). It needs none of
    art's packages. null: the Python that art runs in."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """An external program instead of `entry`. It reads the scenario from standard input and writes one JSON line.
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are set in its environment, and the same three for ANTHROPIC."""
    env: VariableNames = []
    """Names of environment variables that `command` gets besides these and the usual ones of a program (PATH, HOME,
    LANG, ...). Keys and all others are withheld."""
    environment: EnvironmentConfig | None = None
    """A ready-made environment instead of `entry` and `scenarios` (docs/environments.md). A name alone stands for
    {name: ...}."""
    scenarios: Scenarios | None = None
    """A file, or "file.py:function" that returns an iterable of objects with an `id`; a table may choose its columns.
    With `environment` it may be left out: the scenarios are then seeds."""
    group_size: PositiveInt = 8
    """G, the number of attempts per scenario and step."""
    groups_per_step: PositiveInt = 16
    """The number of scenarios per step."""
    refill: Annotated[NonNegative, Field(le=MAX_REFILL)] = 0.0
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a group whose rewards are all equal teaches nothing, and
    is refilled by a group of a further scenario until the step has `groups_per_step` groups with signal. The largest
    number of further groups, as a share of `groups_per_step`. 0: off."""
    concurrency: PositiveInt = 128
    """The number of rollouts that are played at once; 128 is what the embedded engine decodes together."""
    processes: Annotated[Count, Field(le=MAX_PROCESSES)] = 1
    """The number of child processes that run the function; more help a function that computes much. 0: it runs in
    art's own process, for a debugger. With `cluster` they are spread over its nodes, each on processors of its own; if
    not set, as many as are free when the run begins."""
    cluster: RayClusterConfig | None = None
    """Plays the rollouts on the nodes of a cluster (docs/cluster.md). A name alone stands for {name: ...}. null: on
    this machine."""
    timeout_s: Seconds = 600.0
    """The longest time for one rollout, its retries included."""
    max_turns: PositiveInt = 50
    """The largest number of model calls in one rollout."""
    limit_reward: Float = 0.0
    """The reward of a rollout that `max_turns` or the context length ends before it returned one."""
    retries: Count = 2
    """How often a rollout whose transport failed is played again. One whose own code raised is never played again."""
    shuffle: bool = True
    """true: each epoch has a seeded order of its own. false: the file's order, again and again."""
    choose: Literal["epochs", "adaptive"] = "epochs"
    """epochs: every scenario once, then all again. adaptive: scenarios are drawn by how much their past groups' rewards
    differed in this run, so that what is solved or hopeless is played seldom (docs/scenarios.md)."""
    pool: str | None = None
    """A key of the scenarios, such as "level". Scenarios with the same value are a pool, whose mean reward is a metric
    of each step, and which `choose: adaptive` sees as one. null: each scenario is seen alone."""
    replay: ReplayConfig | None = None
    """null: a step trains on its own groups only. Needs `loss.off_policy`."""
    sampling: SamplingConfig = SamplingConfig()

    @property
    def num_spare(self) -> int:
        """The largest number of further groups that a step may play; rounded up, so that a share above 0 is at least
        one group."""
        return math.ceil(round(self.refill * self.groups_per_step, 6))

    @property
    def num_replays(self) -> int:
        """The number of groups of earlier steps that a step trains on again if there are as many; rounded up."""
        if self.replay is None:
            return 0
        return min(math.ceil(round(self.replay.share * self.groups_per_step, 6)), self.groups_per_step - 1)

    @field_validator("environment", "cluster", mode="before")
    @classmethod
    def _by_its_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_kind_of_agent(self) -> Self:
        if [self.entry, self.command, self.environment].count(None) != 2:
            raise ValueError(
                "set exactly one of 'entry' (a Python function), 'command' (an external program) and 'environment' "
                "(a ready-made one)"
            )
        if self.scenarios is None and self.environment is None:
            raise ValueError("set 'scenarios': a file of them, or 'file.py:function'")
        return self
