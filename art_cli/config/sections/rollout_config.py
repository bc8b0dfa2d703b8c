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
    """Defaults for model calls that do not set these values. With `force`, the values for all calls."""

    temperature: NonNegative = 1.0
    """The number by which logits are divided. 0: the likeliest token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """The probability of the smallest set of likeliest tokens that are sampled from. 1: all tokens."""
    top_k: Count = 0
    """The number of likeliest tokens that are sampled from. 0: all tokens."""
    max_tokens: PositiveInt = 1024
    """The largest number of tokens of one reply. A call may set another number; in Anthropic's protocol, where every
    call sets one, only a smaller number."""
    force: bool = False
    """Whether temperature, top_p and top_k of this section, and art's seeds, replace those of a call. The turn
    records the call's values. A call with a penalty, `logit_bias` or `min_tokens` is refused."""


class ReplayConfig(Section):
    """Replay: training on groups of earlier steps again, with importance weights."""

    share: Annotated[Float, Field(gt=0, lt=1)] = 0.25
    """The share of a step's groups that are taken from earlier steps, among groups with signal, instead of played."""
    max_age: PositiveInt = 8
    """The largest number of steps since such a group was played."""


class EnvironmentConfig(Section):
    """A ready-made environment, which provides the agent and the scenarios."""

    name: str
    """LIBRARY/NAME, such as reasoning_gym/countdown. `art environments` lists them."""
    args: dict[str, JsonValue] = {}
    """The environment's settings by its names, such as its difficulty. `art init --environment` writes them with their
    defaults."""
    system: str | None = None
    """The system message of each conversation. "": no message. null: the library's message, if it has one."""
    size: PositiveInt = 1000
    """The number of scenarios. Each is a seed."""
    seed: Annotated[Int, Field(ge=0, le=MAX_COUNT)] = 0
    """The seed of the first scenario. The others follow it."""


class RolloutConfig(Section):
    """The user's agent, the scenarios, and the number of attempts at once and in each step."""

    entry: str | None = None
    """The rollout as "file.py:function": `async def rollout(policy, scenario)`, or a plain `def`."""
    python: Path | None = None
    """The Python that runs the function, 3.11 or newer, or the directory of its environment (.venv). It needs none of
    art's packages. null: the Python that art runs in."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """An external program instead of `entry`. It reads the scenario from standard input and writes one JSON line.
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are set in its environment, and the same three for ANTHROPIC."""
    env: VariableNames = []
    """Names of further environment variables that `command` gets, besides these and the usual ones (PATH, HOME,
    LANG, ...). All others, such as keys, are withheld."""
    environment: EnvironmentConfig | None = None
    """A ready-made environment instead of `entry` and `scenarios` (docs/environments.md). A name alone stands for
    {name: ...}."""
    scenarios: Scenarios | None = None
    """A file, or "file.py:function" that returns an iterable of objects with an `id`; for a table, its columns may be
    chosen. With `environment` the key may be left out: the scenarios are then seeds."""
    group_size: PositiveInt = 8
    """G, the number of attempts per scenario and step."""
    groups_per_step: PositiveInt = 16
    """The number of scenarios per step."""
    refill: Annotated[NonNegative, Field(le=MAX_REFILL)] = 0.0
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): the largest number of further groups, as a share of
    `groups_per_step`, that are played in place of groups without signal, whose rewards are all equal. 0: off."""
    concurrency: PositiveInt = 128
    """The number of rollouts that are played at once. The embedded engine decodes 128 sequences at once."""
    processes: Annotated[Count, Field(le=MAX_PROCESSES)] = 1
    """The number of child processes that run the function. More processes help a function that computes much. 0: the
    function runs in art's process, for a debugger. With `cluster` the processes are spread over its nodes; if the
    key is not set, there are as many as processors are free when the run begins."""
    cluster: RayClusterConfig | None = None
    """The cluster on whose nodes rollouts are played (docs/cluster.md). A name alone stands for {name: ...}. null: this
    machine."""
    timeout_s: Seconds = 600.0
    """The longest time in seconds for one rollout, including its retries."""
    max_turns: PositiveInt = 50
    """The largest number of model calls in one rollout."""
    limit_reward: Float = 0.0
    """The reward of a rollout that `max_turns` or the context length ends before it returned one."""
    retries: Count = 2
    """The number of retries of a rollout after a failure of transport. After an exception in its code there is none."""
    shuffle: bool = True
    """Whether each epoch has another, seeded order of scenarios. false: every epoch has the file's order."""
    choose: Literal["epochs", "adaptive"] = "epochs"
    """The choice of scenarios. epochs: every scenario once per epoch. adaptive: scenarios whose rewards differed
    more in this run are drawn more often, so that solved and hopeless ones are rarely played (docs/scenarios.md)."""
    pool: str | None = None
    """A key of the scenarios, such as "level". Scenarios with the same value form a pool. Each step reports the mean
    reward of each pool, and `choose: adaptive` draws by pools. null: no pools."""
    replay: ReplayConfig | None = None
    """Replay of earlier groups, which needs `loss.off_policy`. null: a step trains on its own groups only."""
    sampling: SamplingConfig = SamplingConfig()

    @property
    def num_spare(self) -> int:
        """The largest number of further groups in a step, rounded up, so that a share above 0 is at least one group."""
        return math.ceil(round(self.refill * self.groups_per_step, 6))

    @property
    def num_replays(self) -> int:
        """The largest number of groups of earlier steps that a step trains on again, rounded up."""
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
