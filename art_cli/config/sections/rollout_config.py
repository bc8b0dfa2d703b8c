"""The `rollout` section: the agent, scenarios, sampling, limits, and the cluster for rollouts.

`scenarios` is also a section in `eval`. `rollout.sources` defines several agents, with separate scenarios.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from art_cli.config.sections.base_config import (
    MAX_COUNT,
    MAX_PROCESSES,
    Count,
    Float,
    Int,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)
from art_cli.config.sections.judge_config import ScoringJudge, ShadowName

MAX_RESOURCE = 1e6  # largest amount per process
# Raised by agents for wrong tool calls and unreadable replies. ValueError includes the errors of JSON and pydantic.
POLICY_FAILURES = (
    *("ValueError", "LookupError", "TypeError", "AttributeError", "ArithmeticError", "AssertionError", "SyntaxError"),
    *("RecursionError", "ValidationError", "SubprocessError", "DatabaseError", "own"),
)
# Keys in Ray's runtime_env that art sets -> what the user sets instead.
OWN_RUNTIME_ENV = {
    "working_dir": "the config's directory is sent; rollout.cluster.exclude leaves files out",
    "excludes": "set rollout.cluster.exclude",
    "py_modules": "put modules into the config's directory, or name packages in pip",
    "env_vars": "it is shown on the cluster's pages; name the variables in rollout.cluster.env",
}
OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
SAVED = ("state.json", "dataset_dict.json")  # files in a saved dataset's directory
MAX_AT_ONCE = 1024  # limit for `concurrency: auto`; a rollout may use a sandbox or a connection
MAX_REFILL = 100.0  # extra groups per planned group
OF_SOURCES = ("entry", "command", "environment", "scenarios")  # keys for sources instead of `rollout`


def _are_names(names: list[str]) -> list[str]:
    for name in names:
        if not (name.isidentifier() and name.isascii()):
            raise ValueError(f"{name!r} is not a variable name; the value is taken from this machine's environment")
    return names


VariableNames = Annotated[list[str], AfterValidator(_are_names)]


def _are_classes(names: list[str]) -> list[str]:
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a class; write it without its module, such as KeyError")
    return names


ClassNames = Annotated[list[str], AfterValidator(_are_classes)]


class RayClusterConfig(Section):
    """An existing Ray cluster, one of whose nodes is this machine."""

    name: Literal["ray"] = "ray"
    """The kind of cluster."""
    address: str = "auto"
    """The cluster's address, HOST:PORT. auto: RAY_ADDRESS, else this machine's cluster."""
    cpus: Annotated[PositiveFloat, Field(le=MAX_RESOURCE)] = 1.0
    """The processors that each rollout process reserves on its node."""
    resources: dict[str, Annotated[PositiveFloat, Field(le=MAX_RESOURCE)]] = {}
    """Custom Ray resources that each process also reserves, such as {sandbox: 1}; only nodes with them run it."""
    runtime_env: dict[str, JsonValue] = {}
    """More keys for Ray's runtime_env, such as {pip: [httpx, numpy]}."""
    env: VariableNames = []
    """Names of this machine's environment variables that nodes get, in addition to `rollout.env`. No others are
    sent."""
    exclude: list[str] = []
    """Patterns of files and directories that stay here, such as ["data", "*.csv"]."""
    max_file_mb: PositiveFloat = 20.0
    """Larger files in the config's directory, in MB, are not sent."""
    gateway_url: str | None = None
    """The gateway's address for nodes, such as http://10.0.0.5:8000, if a mapped port changes it. null: this machine's
    address in the cluster."""
    wait_s: Seconds = 600.0
    """The longest wait in seconds for free resources. Then the run stops, and can be resumed."""
    python: Path | None = None
    """A local Python with the cluster's Ray version, or its environment's directory. null: art's Python."""

    @field_validator("address")
    @classmethod
    def _is_existing(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(
                "this machine must be a node of the cluster, because the nodes call its gateway: "
                "`ray start --address=HOST:6379 --num-cpus=0` here, then address: auto"
            )
        host, _, port = address.rpartition(":")
        if address != "auto" and not (host and port.isdecimal() and 0 < int(port) <= 65535):
            raise ValueError(f"{address!r}: expected HOST:PORT, or auto")
        return address

    @field_validator("runtime_env")
    @classmethod
    def _leaves_ours(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in OWN_RUNTIME_ENV.keys() & given.keys():
            raise ValueError(f"{name}: {OWN_RUNTIME_ENV[name]}")
        return given

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, given: dict[str, float]) -> dict[str, float]:
        for name in given.keys() & set(OWN_RESOURCES):
            raise ValueError(f"{name} is not a custom resource; rollout.cluster.cpus reserves processors")
        return given

    @field_validator("gateway_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r}: expected http://HOST:PORT")
        return None if url is None else url.rstrip("/").removesuffix("/v1")

    @field_validator("exclude")
    @classmethod
    def _are_not_empty(cls, patterns: list[str]) -> list[str]:
        if not all(pattern.strip("/") for pattern in patterns):
            raise ValueError("an empty pattern; leave it out")
        return patterns


def cluster_conflicts(*, processes: int | None, python: Path | None, entry: str | None) -> Iterator[tuple[str, str]]:
    """Yields (key, message) for rollout settings that contradict a cluster. `processes` defaults to None."""
    if processes == 0:
        yield "processes", "with rollout.cluster the function runs on other machines; leave one of them out"
    if python is not None:
        why = "names a Python of this machine, and with rollout.cluster Ray's Python on each node runs the function"
        yield "python", f"{why}; name its packages in rollout.cluster.runtime_env: {{pip: [...]}}"
    file = (entry or "").rpartition(":")[0]
    if file.endswith(".py") and (Path(file).is_absolute() or ".." in Path(file).parts):
        yield "entry", f"{file} is not in the config's directory, which alone is sent to the nodes of rollout.cluster"


class ScenariosConfig(Section):
    """The source of scenarios and the columns of a table that make them up (docs/scenarios.md). A source alone
    means {source: ...}."""

    source: str
    """A file (JSON lines, CSV, Parquet, SQLite, DuckDB), a `save_to_disk` directory from the library datasets, a
    Hugging Face hub dataset, or "file.py:function" that returns an iterable of objects with an `id`."""
    columns: dict[str, str] = {}
    """Maps scenario keys to columns: {id: number, question: text}. `id` defaults to a hash of the scenario. {}: all
    columns."""
    query: str | None = None
    """A SELECT for a SQLite or DuckDB file, opened read-only. It makes the table's columns."""
    timeout_s: Seconds = 60.0
    """The query's time limit."""
    split: str | None = None
    """A dataset's split: "train", "train[:500]". A source that is neither file nor directory is then a hub dataset."""
    subset: str | None = None
    """A hub dataset's subset (configuration)."""
    revision: str | None = None
    """A hub dataset's branch, tag or commit. A commit never changes."""

    @model_validator(mode="after")
    def _one_kind_of_source(self) -> Self:
        if self.query is not None and self.split is not None:
            raise ValueError("'query' is for a database, 'split' for a dataset; leave one of them out")
        if self.split is None and (self.subset or self.revision):
            raise ValueError("'subset' and 'revision' are for a dataset of the hub, which needs 'split' too")
        if self.query is None and "timeout_s" in self.model_fields_set:
            raise ValueError("'timeout_s' is the time for a 'query'; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> Any:
        """Dumps a plain source as text, as in the records of older runs."""
        return self.source if self == ScenariosConfig(source=self.source) else dump(self)


def _by_source(value: Any) -> Any:
    """Converts a plain source to a section."""
    is_alone = isinstance(value, str | int | float) and not isinstance(value, bool)
    return {"source": value} if is_alone else value


Scenarios = Annotated[ScenariosConfig, BeforeValidator(_by_source)]


def is_dataset(path: Path) -> bool:
    """Returns True for a directory written by `save_to_disk` (library datasets)."""
    return any((path / name).is_file() for name in SAVED)


class SamplingConfig(Section):
    """Defaults for model calls without these values. With `force`, values for all calls."""

    temperature: NonNegative = 1.0
    """Logits are divided by it. 0: the likeliest token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Samples from the smallest set of likeliest tokens with this probability. 1: all tokens."""
    top_k: Count = 0
    """Samples from this many likeliest tokens. 0: all tokens."""
    max_tokens: PositiveInt = 1024
    """The limit on a reply's tokens. A call may set another number; in Anthropic's protocol, where every call sets a
    number, only a smaller one."""
    force: bool = False
    """Whether this section's temperature, top_p and top_k, and art's seeds, override a call's. The turn records the
    call's values. Calls with a penalty, `logit_bias` or `min_tokens` are refused."""


class EnvironmentConfig(Section):
    """A ready-made environment, which provides the agent and the scenarios."""

    name: str
    """LIBRARY/NAME, such as reasoning_gym/countdown. `art environments` lists them."""
    args: dict[str, JsonValue] = {}
    """The environment's settings, such as its difficulty. `art init --environment` writes them with their defaults."""
    system: str | None = None
    """The system message. "": no message. null: the library's message, if any."""
    size: PositiveInt = 1000
    """The number of scenarios; each is a seed."""
    seed: Annotated[Int, Field(ge=0, le=MAX_COUNT)] = 0
    """The first scenario's seed. The others follow."""


def _by_its_name(value: Any) -> Any:
    """Converts an environment's or a cluster's plain name to a section."""
    return {"name": value} if isinstance(value, str) else value


def _check_agent(agent: "SourceConfig | RolloutConfig") -> None:
    """Raises ValueError unless there is exactly one agent with scenarios."""
    if [agent.entry, agent.command, agent.environment].count(None) != 2:
        raise ValueError(
            "set exactly one of 'entry' (a Python function), 'command' (an external program) and 'environment' "
            "(a ready-made one)"
        )
    if agent.scenarios is None and agent.environment is None:
        raise ValueError("set 'scenarios': a file of them, or 'file.py:function'")


class SourceConfig(Section):
    """One source of groups: an agent with scenarios. Missing settings are taken from `rollout` and `judge`."""

    weight: PositiveFloat = 1.0
    """The source's share of the groups, relative to the other weights."""
    entry: str | None = None
    """As `rollout.entry`."""
    python: Path | None = None
    """As `rollout.python`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """As `rollout.command`."""
    env: VariableNames | None = None
    """As `rollout.env`."""
    environment: EnvironmentConfig | None = None
    """As `rollout.environment`."""
    scenarios: Scenarios | None = None
    """As `rollout.scenarios`."""
    eval_scenarios: Scenarios | None = None
    """The scenarios for evaluations. null: the share `eval.held_out` of `scenarios`."""
    judge: ScoringJudge | None = None
    """The judge for its groups, written like the section `judge`. null: the section `judge`."""
    max_tokens: PositiveInt | None = None
    """As `rollout.sampling.max_tokens`."""
    timeout_s: Seconds | None = None
    """As `rollout.timeout_s`."""
    max_turns: PositiveInt | None = None
    """As `rollout.max_turns`."""
    limit_reward: Float | None = None
    """As `rollout.limit_reward`."""
    retries: Count | None = None
    """As `rollout.retries`."""
    processes: Annotated[Count, Field(le=MAX_PROCESSES)] | None = None
    """As `rollout.processes`."""
    pool: str | None = None
    """As `rollout.pool`."""

    _environment_by_name = field_validator("environment", mode="before")(_by_its_name)

    @model_validator(mode="after")
    def _one_kind_of_agent(self) -> Self:
        _check_agent(self)
        return self


class RolloutConfig(Section):
    """The agent, its scenarios, and the attempts per step."""

    entry: str | None = None
    """The rollout as "file.py:function": `async def rollout(policy, scenario)`, or a plain `def`."""
    python: Path | None = None
    """The Python for the function, 3.11 or newer, or its environment's directory (.venv). It needs none of art's
    packages. null: art's Python."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """An external program instead of `entry`. It reads the scenario from standard input and writes a JSON line. Its
    environment has OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, and the same three for ANTHROPIC."""
    env: VariableNames = []
    """Names of more environment variables for `command`. The usual variables (PATH, HOME, LANG, ...) are always passed;
    keys, for example, are not."""
    environment: EnvironmentConfig | None = None
    """A ready-made environment instead of `entry` and `scenarios` (docs/rollouts.md). A name alone means {name:
    ...}."""
    scenarios: Scenarios | None = None
    """A file, or "file.py:function" that returns an iterable of objects with an `id`; tables may select columns. With
    `environment` the key is optional: scenarios are then seeds."""
    group_size: PositiveInt = 4
    """G, the attempts per scenario and step."""
    groups_per_step: PositiveInt = 4
    """The scenarios per step. A policy learns the same from a fraction of the attempts if steps are small: what helps
    is a newer policy for each few attempts (benchmarks/results/LOG.md). Larger steps (attempts=many) need fewer of
    them, and keep a GPU busy where attempts cost little."""
    refill: Annotated[NonNegative, Field(le=MAX_REFILL)] = 0.0
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): extra groups, as a share of `groups_per_step`, that may
    replace groups with equal rewards. 0: off."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """The rollouts played in parallel. auto: enough to keep the engine busy, from 1 to 1,024. It starts with the
    engine's parallel requests and follows waiting requests, memory and rate limits (docs/rollouts.md)."""
    processes: Annotated[Count, Field(le=MAX_PROCESSES)] = 1
    """The child processes for the function. More processes help a function that computes much. 0: art's own process,
    for a debugger. With `cluster` they are spread over its nodes; default there: the free processors at the start."""
    cluster: RayClusterConfig | None = None
    """The cluster that plays rollouts (docs/scale.md). A name alone means {name: ...}. null: this machine."""
    timeout_s: Seconds = 600.0
    """The time limit in seconds for a rollout with its retries."""
    max_turns: PositiveInt = 50
    """The limit on model calls per rollout."""
    limit_reward: Float = 0.0
    """The reward if `max_turns`, the context length or the policy's own failure ends a rollout before it returned a
    reward."""
    failures: ClassNames = [*POLICY_FAILURES]
    """The exception classes, with their subclasses, that mean the policy's own failure if the rollout's code raises one
    of them after a reply: a wrong tool call must not leave the reward. Such an attempt is trained on and gets at most
    its group's lowest reward. "own": all classes in the agent's files. Other errors, and errors raised from OSError,
    are the infrastructure's, and their attempts are left out. []: all are."""
    retries: Count = 2
    """The retries after a transport failure. An exception in the rollout's code is never retried."""
    shuffle: bool = True
    """Whether each epoch shuffles scenarios, by the seed. false: the file's order."""
    choose: Literal["epochs", "adaptive"] = "epochs"
    """The choice of scenarios. epochs: each scenario once per epoch. adaptive: prefers scenarios with larger reward
    differences in this run, so solved and hopeless scenarios are rare (docs/scenarios.md)."""
    pool: str | None = None
    """A scenario key, such as "level". Scenarios with equal values form a pool. Each step reports every pool's mean
    reward, and `choose: adaptive` draws by pools. null: no pools."""
    sampling: SamplingConfig = SamplingConfig()
    sources: dict[ShadowName, SourceConfig] = {}
    """Several agents in a run: {letters: {entry: "letters.py:rollout", scenarios: letters.jsonl, weight: 2}, words:
    {...}}. Each step mixes their groups by weight (docs/rollouts.md)."""

    @property
    def by_source(self) -> "dict[str, RolloutConfig]":
        """Rollout sections by source, sorted by name; {"": self} without sources."""
        return {name: self._of(source) for name, source in sorted(self.sources.items())} or {"": self}

    def _of(self, source: SourceConfig) -> "RolloutConfig":
        own = {key: value for key in RolloutConfig.model_fields if (value := getattr(source, key, None)) is not None}
        if source.max_tokens is not None:
            own["sampling"] = self.sampling.model_copy(update={"max_tokens": source.max_tokens})
        return self.model_copy(update=own | {"sources": {}})

    @property
    def longest_answer(self) -> int:
        """Limit on the sampled tokens per attempt, over all sources."""
        return max(each.max_turns * each.sampling.max_tokens for each in self.by_source.values())

    @property
    def most_at_once(self) -> int:
        """Limit on concurrent rollouts."""
        return MAX_AT_ONCE if self.concurrency == "auto" else self.concurrency

    @property
    def num_spare(self) -> int:
        """Limit on extra groups per step, rounded up to at least 1 for a share above 0."""
        return math.ceil(round(self.refill * self.groups_per_step, 6))

    _section_by_name = field_validator("environment", "cluster", mode="before")(_by_its_name)

    @model_validator(mode="after")
    def _one_kind_of_agent(self) -> Self:
        if not self.sources:
            _check_agent(self)
        elif given := [key for key in OF_SOURCES if getattr(self, key) is not None]:
            raise ValueError(f"with 'sources' each source has its own {given[0]!r}; move it into one of them")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits an empty `sources`, as in the records of older runs."""
        dumped: dict[str, Any] = dump(self)
        if not self.sources:
            dumped.pop("sources", None)
        return dumped
