"""verifiers: tasksets with rewards, played by verifiers' own harnesses (github.com/PrimeIntellect-ai/verifiers).

    rollout: {environment: {name: verifiers/gsm8k_v1, args: {agent: {max_turns: 4}}}, python: verifiers/.venv}

`args` is verifiers' `[env]` block with verifiers' names: `taskset`, agent roles such as `agent`, `timeout`. A
scenario's seed is the task's index in the taskset. verifiers runs the episode. All model calls go through verifiers'
proxy to the gateway unchanged. The reward is the trace's reward; reward components and metrics become metrics.

A role without a harness uses the taskset's harness. If the taskset has none, verifiers_chat.py plays the role.

Programs run on this machine, and not in verifiers' paid sandbox. An environment with several roles trains the role
`trained`; the other roles' turns are not recorded. verifiers pins versions that conflict with art's other extras, so it
needs another Python (`rollout.python`).
"""

import asyncio
import copy
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from art_cli.rollouts.environments import EnvironmentFault, Json, Listing, Settings, seed_of
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import UsageError, describe, first_sentence, one_line

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 200  # attempts per set of servers, because servers keep a client and a connection for each attempt
START_S = 300.0  # longest wait for an environment's servers, including tool servers
TRAINED = "trained"  # our additional argument: the role to train


class Verifiers:
    """The library. Environment names are taskset modules, such as "gsm8k_v1"."""

    package, extra = "verifiers", ""
    takes_one_turn, makes_scenarios = False, True
    about = "verifiers tasksets with rewards, played by verifiers' harnesses; needs a separate Python"

    def listed(self) -> Iterator[Listing]:
        """Yields verifiers' tasksets and installed packages that require verifiers."""
        _check_version()
        from verifiers.v1 import tasksets

        for place in tasksets.__path__:
            for name in sorted(os.listdir(place)):
                if not name.startswith("_"):
                    yield _listed(name, "comes with verifiers")
        for distribution in distributions():
            if any(_is_verifiers(each) for each in distribution.requires or ()):
                about = distribution.metadata["Summary"] or f"a taskset, version {distribution.version}"
                yield _listed(distribution.name.replace("-", "_").lower(), str(about))

    def defaults(self, name: str) -> Json:
        """Returns the taskset's settings and the agent's settings."""
        config = _config(name, {})
        taskset = config.taskset.model_dump(mode="json", exclude={"id", "task", "system_prompt"})
        return {"taskset": taskset} if taskset else {}

    def open(self, name: str, settings: Settings) -> "VerifiersEnvironment":
        _check_version()
        if settings.directory not in sys.path:  # tasksets next to the configuration, also for their tool servers
            sys.path.append(settings.directory)
            path = filter(None, [os.environ.get("PYTHONPATH"), settings.directory])
            os.environ["PYTHONPATH"] = os.pathsep.join(path)
        return VerifiersEnvironment(name, settings)


def _check_version() -> None:
    try:
        import verifiers.v1  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"verifiers 0.4 or newer is needed here: {error}; pip install -U verifiers") from error


def _is_verifiers(requirement: str) -> bool:
    return requirement.startswith("verifiers") and not requirement[len("verifiers") :][:1].isalnum()


def _listed(name: str, about: str) -> Listing:
    from verifiers.v1.utils.loaders import taskset_class

    try:
        taskset = taskset_class(name)
    except Exception as error:  # the boundary to the taskset's package
        return Listing(name, about, one_line(error))
    said = first_sentence(taskset.__doc__ or "")
    return Listing(name, said if said and about.startswith(("comes", "a taskset")) else about)


def _config(name: str, args: Json) -> Any:
    """verifiers' configuration of the environment. Raises what verifiers raises."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    data = {**args, "taskset": {**args.get("taskset", {}), "id": name}, "retries": {"max_retries": 0}}
    for role, spec in agent_config_fields(env_config_type(name, args.get("id", ""))()).items():
        given = args.get(role, {})
        own = {"runtime": {"type": "subprocess"}, **_harness(name, spec.harness), **given}
        data[role] = {**own, "retries": {"max_retries": 0}}
    return resolve_env_config(data)


def _harness(taskset: str, declared: Any) -> Json:
    """Uses our harness if a role has none or the plain conversation, else the environment's or taskset's."""
    from verifiers.v1.utils.loaders import default_harness_id

    from art_cli.rollouts.environments import verifiers_chat

    is_plain = default_harness_id(taskset) != taskset if declared is None else declared.id == "null"
    return {"harness": {"id": verifiers_chat.ID}} if is_plain else {}


class VerifiersEnvironment:
    """An environment with its settings. It can be played many times."""

    def __init__(self, name: str, settings: Settings) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment

        args = dict(settings.args)
        trained = args.pop(TRAINED, None)
        if settings.system is not None:
            raise UsageError("rollout.environment.system: a task of verifiers has its own; args.taskset.system_prompt")
        self._name = settings.name
        config = _config(name, args)
        self._roles = list(agent_config_fields(config))
        self._trained = _choose(trained, self._roles, settings.name)
        self._config = config
        self._env = load_environment(config)
        self._tasks: list[Any] = []
        self._unread = iter(self._env.taskset)
        try:
            self._find(max(settings.num_seeds - 1, 0))
        except EnvironmentFault as fault:
            raise UsageError(str(fault)) from fault
        self._servers = _Servers(copy.copy(self._env))

    def _find(self, seed: int) -> Any:
        """Returns the task with this index. Endless tasksets are read only up to this task."""
        while len(self._tasks) <= seed:
            try:
                self._tasks.append(next(self._unread))
            except StopIteration:
                count = len(self._tasks)
                raise EnvironmentFault(
                    f"{self._name} has {count} tasks, numbered from 0, and none with the number {seed}; "
                    f"set rollout.environment.size to {count}"
                ) from None
        return self._tasks[seed]

    async def play(self, policy: "Policy", scenario: Json) -> Outcome:
        task = self._find(seed_of(scenario))
        if self._servers.num_begun >= MAX_ATTEMPTS:
            self._servers = _Servers(copy.copy(self._env))
        with _key(policy.api_key) as variable:
            async with self._servers.running() as env:
                episode = await self._episode(env, policy, task, variable)
        failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
        if failures:
            raise EnvironmentFault(f"{self._name}: {failures[0].type}: {failures[0].message[:2000]}")
        return self._outcome(episode)

    async def _episode(self, served: Any, policy: "Policy", task: Any, variable: str) -> Any:
        """Returns the finished episode. The policy plays all roles, and one role is recorded."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
        unrecorded = client.model_copy(update={"headers": policy.unrecorded})
        specs = {role: getattr(self._config, role) for role in self._roles if role != self._trained}
        others = {
            role: spec.model_copy(update={"client": unrecorded})
            for role, spec in specs.items()
            if spec.client is None  # other roles use the model from their configuration
        }
        env = copy.copy(served)  # the copy shares the servers but uses this attempt's clients
        env.config = self._config.model_copy(update=others)
        return await env.run_episode(task, ModelContext(model=policy.model, client=client))

    def _outcome(self, episode: Any) -> Outcome:
        own = [trace for trace in episode.traces if len(self._roles) == 1 or trace.agent.name == self._trained]
        if not own:
            raise EnvironmentFault(f"{self._name}: the role {self._trained!r} did not play")
        rewards, metrics = dict[str, list[float]](), dict[str, list[float]]()
        for trace in own:
            for name, part in trace.rewards.items():
                rewards.setdefault(name, []).extend([] if part is None else [part.score])
            for name, value in trace.metrics.items():
                metrics.setdefault(name, []).extend([] if value is None else [value])
        values = {name: sum(each) / len(each) for name, each in {**metrics, **rewards}.items() if each}
        reward = sum(trace.reward for trace in own) / len(own) if any(rewards.values()) else None
        stops = [trace.stop_condition for trace in own]
        if reward is not None and not math.isfinite(reward):
            raise EnvironmentFault(f"{self._name}: the reward is {reward}")
        return Outcome(
            reward=reward,
            metrics={name: value for name, value in values.items() if math.isfinite(value)},
            metadata={"role": self._trained, "stopped_by": stops[-1]},
        )


def _choose(trained: Any, roles: list[str], name: str) -> str:
    if trained is None and len(roles) == 1:
        return roles[0]
    if trained not in roles:
        problem = "it has several roles" if trained is None else f"it has no role {trained!r}"
        raise UsageError(
            f"rollout.environment.args.{TRAINED} of {name}: {problem}; one of {', '.join(roles)} is trained"
        )
    return str(trained)


@contextmanager
def _key(key: str) -> Iterator[str]:
    """Yields the name of a variable with the attempt's key, named so that verifiers' programs do not inherit it."""
    name = f"ART_API_KEY_{uuid4().hex.upper()}"
    os.environ[name] = key
    try:
        yield name
    finally:
        os.environ.pop(name, None)


class _Servers:
    """verifiers' servers for one environment. They run in a separate task while any attempt is running.

    verifiers' resources must be closed by the task that opened them. Each attempt needs a client with its own key, so
    another set of servers takes over after MAX_ATTEMPTS.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.num_begun = self._num_attempts = 0
        self._lock = asyncio.Lock()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Any]:
        """Yields the served environment. Raises EnvironmentFault if the servers do not start."""
        self.num_begun += 1
        async with self._lock:
            if self._task is not None and (self._over.is_set() or self._task.done()):
                await asyncio.wait((self._task,), timeout=START_S)
                self._task = None
            if self._task is None:
                await self._start()
            self._num_attempts += 1
        try:
            yield self._env
        finally:
            self._num_attempts -= 1
            if self._num_attempts == 0:
                self._over.set()

    async def _start(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._serve(ready, self._over))
        try:
            async with asyncio.timeout(START_S):
                await ready
        except BaseException as error:  # the boundary to the environment; also the end of the attempt's time
            self._task.cancel()
            self._over.set()
            if not isinstance(error, Exception):
                raise
            raise EnvironmentFault(f"verifiers: its servers did not start: {describe(error)}") from error

    async def _serve(self, ready: "asyncio.Future[None]", over: asyncio.Event) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await over.wait()
        except Exception as error:  # the boundary to the environment
            if not ready.done():
                ready.set_exception(error)
            else:
                log.warning("verifiers: its servers did not end well: %s", describe(error))
