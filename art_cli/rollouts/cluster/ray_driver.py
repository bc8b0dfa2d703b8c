"""RayRollout: Ray's driver, in a separate process that cluster_rollout.py calls; and the packages for the nodes.

bootstrap.py starts the process. The driver places one actor (ray_node.py) per rollout process and sends each attempt to
the least busy actor. If an actor or its node is lost, its attempts fail as `node` errors, which the runner retries, and
the driver places another actor. Needs only the standard library and Ray.

The packages are copies of the config's directory and of this package. The copies omit hidden files (.env, .git, .venv),
runs, Python environments, and files above a size limit. Keys in a .env file therefore stay on this machine.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from art_cli.rollouts.attempt_errors import NODE, AttemptError, Json, read_report
from art_cli.rollouts.bootstrap import PACKAGE
from art_cli.rollouts.cluster.ray_node import NodeActor
from art_cli.rollouts.policy import Policy
from art_cli.rollouts.process_worker import ServedRollout, serve_and_exit
from art_cli.runs.outcome import Outcome
from art_cli.runtime import log as logs
from art_cli.runtime.errors import ArtError, RolloutError, UsageError, describe, message_of, one_line, printable
from art_cli.runtime.processes.process_calls import FROM_PROCESS, Call, Raised, decode, encode, error_named
from art_cli.runtime.scratch import scratch
from art_cli.runtime.threads import end

log = logging.getLogger(__name__)

MAX_FILES = 20_000
MAX_BYTES = 200 * 10**6  # Ray's limit is 500 MiB, which each node would download before playing
MB = 10**6
NEVER = ("__pycache__",)
NOT_PLAYED = ("view", "recipes")  # rooms of the package that hold no code of rollouts
ANSWER_DEADLINE_S = 5.0  # longest wait for the cluster's address to take a connection
ASK_DEADLINE_S = 20.0  # longest wait for the cluster's own account of itself
LAST_OUTPUT_S = 2.0  # longest wait for the attempts' last output
CLOSE_DEADLINE_S = 8.0  # longest wait for the actors to close the function's clients
EXPLAIN_DEADLINE_S = 4.0
OURS = frozenset({"working_dir", "py_modules", "excludes", "env_vars"})  # fields of runtime_env
TELL_S = 2.0  # interval of messages about placed actors
AGAIN_S = 1.0  # pause before an actor is placed again
FAILED_AGAIN_S = 30.0  # the same wait after a failed load
MORE_CALLS = 16  # concurrent actor calls in addition to attempts: output and close
MAX_PRINTED = 2**17  # maximum characters of output in an answer; nodes are not trusted


def copy_project(directory: Path, target: Path, *, runs: Path, exclude: Sequence[str], max_file_mb: float) -> list[str]:
    """Copies the files that nodes need from `directory`. Raises UsageError if they are too large or unreadable.

    Returns the files above `max_file_mb`, which are not copied. Example: ["data/big.csv (31.0 MB)"]
    """
    sizes: list[tuple[int, str]] = []
    too_large: list[str] = []
    num_bytes = 0
    for path in _files(directory, runs, exclude):
        name = path.relative_to(directory).as_posix()
        try:
            size = path.stat().st_size
            if size > max_file_mb * MB:
                too_large.append(f"{name} ({size / MB:,.1f} MB)")
                continue
            sizes.append((size, name))
            num_bytes += size
            if len(sizes) > MAX_FILES or num_bytes > MAX_BYTES:
                largest = ", ".join(f"{name} ({size / MB:.1f} MB)" for size, name in sorted(sizes, reverse=True)[:3])
                raise UsageError(
                    f"{directory}: more than {MAX_FILES:,} files or {MAX_BYTES / MB:.0f} MB would be sent to each "
                    f"node, such as {largest}; leave some out with rollout.cluster.exclude"
                )
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            cure = "rollout.cluster.exclude leaves it out"
            raise UsageError(f"{path}: it cannot be sent to the cluster: {message_of(error)}; {cure}") from error
    return too_large


def copy_package(target: Path) -> None:

    def left_out(place: str, names: list[str]) -> list[str]:
        own = NOT_PLAYED if place == PACKAGE else ()
        return [
            name
            for name in names
            if name in (*NEVER, *own) or not (name.endswith(".py") or os.path.isdir(os.path.join(place, name)))
        ]

    shutil.copytree(PACKAGE, target, ignore=left_out)


def _files(directory: Path, runs: Path, exclude: Sequence[str]) -> Iterator[Path]:
    seen = {os.path.realpath(directory)}  # guards against circular links
    for place, directories, files in os.walk(directory, followlinks=True):
        here = Path(place)
        sent = [name for name in sorted(directories) if _is_sent(here / name, directory, runs, exclude)]
        directories[:] = [name for name in sent if os.path.realpath(here / name) not in seen]
        seen.update(os.path.realpath(here / name) for name in directories)
        for name in sorted(files):
            path = here / name
            if _is_sent(path, directory, runs, exclude) and path.is_file():
                yield path


def _is_sent(path: Path, directory: Path, runs: Path, exclude: Sequence[str]) -> bool:
    if path.name.startswith(".") or path.name in NEVER or path == runs or (path / "pyvenv.cfg").is_file():
        return False
    name = path.relative_to(directory).as_posix()
    return not any(fnmatch(name, pattern.strip("/")) or fnmatch(path.name, pattern.strip("/")) for pattern in exclude)


def main() -> None:
    """Runs the driver. Attempts and the driver print to stdout, and Ray prints to stderr."""
    output = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    os.dup2(2, 1)
    with contextlib.redirect_stderr(output):
        logs.set_up()
    serve_and_exit(ServedCluster(output.write))


class ServedCluster(ServedRollout):
    """The methods that cluster_rollout.py calls, in addition to the standard rollout methods."""

    _rollout: "RayRollout"

    def __init__(self, show: Callable[[str], Any]) -> None:
        self._show = show

    async def load(self, cluster: Json, project: Json, played: Json, processes: int | None, concurrency: int) -> str:
        """Connects to the cluster and returns the Python version. Blocks, because Ray connects in the main thread.

        `cluster` is the configuration section, `project` has the directory and its runs, and `played` has the
        parameters for ServedNode.load except the gateway.
        """
        connect(cluster, project)
        self._rollout = RayRollout(cluster, played, processes=processes, concurrency=concurrency, show=self._show)
        return sys.version.split()[0]

    async def facts(self) -> Json:
        return vars(await ask_facts())

    async def ready(self, gateway: str, progress: Callable[[int, int], None]) -> None:
        await self._rollout.ready(gateway, progress)


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about a cluster. Example: ClusterFacts("10.0.0.1", "2.60.0", 3, 24.0, 20.0)"""

    host: str  # this machine's address in the cluster
    version: str  # Ray's
    nodes: int
    processors: float
    free: float  # processors
    resources: dict[str, float] = field(default_factory=dict)  # free ones, by Ray's names


def connect(cluster: Json, project: Json) -> None:
    """Connects this process. Raises UsageError, RolloutError: it cannot be."""
    try:
        import ray
    except ImportError as error:
        cure = "pip install 'art-cli[ray]' there, or name a Python that has it in rollout.cluster.python"
        raise UsageError(f"rollout.cluster: {sys.executable} has no Ray: {one_line(error)}; {cure}") from error
    if unknown := sorted(cluster["runtime_env"].keys() - ray.runtime_env.RuntimeEnv.known_fields):
        known = sorted(name for name in ray.runtime_env.RuntimeEnv.known_fields - OURS if not name.startswith("_"))
        raise UsageError(f"rollout.cluster.runtime_env: Ray knows no {unknown[0]!r}; there are {', '.join(known)}")
    address = cluster["address"]
    _look_for(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
    with scratch("cluster") as copies:
        work, package = copies / "work", copies / "package" / "art_cli"
        work.mkdir()
        limits = {name: cluster[name] for name in ("exclude", "max_file_mb")}
        too_large = copy_project(Path(project["directory"]), work, runs=Path(project["runs"]), **limits)
        if too_large:
            listed = ", ".join(too_large[:5])
            log.warning("not sent to the cluster, as too large (rollout.cluster.max_file_mb): %s", listed)
        copy_package(package)
        own = {"working_dir": str(work), "py_modules": [str(package)]}
        try:
            ray.init(
                address=address,
                runtime_env={**cluster["runtime_env"], **own},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises many kinds of errors
            raise RolloutError(f"rollout.cluster: {_explain(error)}") from error


def _look_for(address: str) -> None:
    """Raises RolloutError: nothing listens at HOST:PORT, which Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_DEADLINE_S).close()
    except OSError as error:
        cure = "is the cluster running? check with `ray status` there"
        raise RolloutError(
            f"rollout.cluster: nothing answers at {address}: {error.strerror or error}; {cure}"
        ) from error


def _explain(error: Exception) -> str:
    """Explains in one line why Ray refused this process, and how to fix it."""
    text = message_of(error)
    found = re.findall(r"(?m)^\s*(?:Ray|Python): *(\S+)", text)
    if "mismatch" in text and len(found) == 4:
        theirs, ours = f"Ray {found[0]} on Python {found[1]}", f"Ray {found[2]} on Python {found[3]}"
        cure = "name a Python with the cluster's versions in rollout.cluster.python"
        return printable(f"the cluster runs {theirs}, and this is {ours}; {cure}")
    if isinstance(error, ConnectionError):
        start = "ray start --address=HOST:6379 --num-cpus=0"
        return f"this machine is not part of a running Ray cluster: {one_line(error)}; `{start}` here makes it one"
    return f"Ray refuses: {type(error).__name__}: {one_line(error)}"


async def ask_facts() -> ClusterFacts:
    """Returns the cluster's current facts. Raises RolloutError if the cluster does not answer."""
    try:
        async with asyncio.timeout(ASK_DEADLINE_S):
            return await asyncio.to_thread(_facts)
    except Exception as error:  # Ray's errors after losing the cluster
        raise RolloutError(f"rollout.cluster: the cluster does not answer: {one_line(error)}") from error


def _facts() -> ClusterFacts:
    import ray

    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    host = next(node["NodeManagerAddress"] for node in nodes if node["NodeID"] == own)
    free = {name: float(amount) for name, amount in ray.available_resources().items()}
    processors = sum(float(node["Resources"].get("CPU", 0.0)) for node in nodes)
    return ClusterFacts(host, ray.__version__, len(nodes), processors, free.get("CPU", 0.0), free)


class RayRollout:
    """A Rollout played by actors. `ready` places the actors."""

    def __init__(
        self, cluster: Json, played: Json, *, processes: int | None, concurrency: int, show: Callable[[str], Any]
    ) -> None:
        self._cluster, self._played, self._num_wanted, self._concurrency = cluster, played, processes, concurrency
        self._places: list[_Place] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._beginning = asyncio.Lock()
        self._changed = asyncio.Event()
        self._show = show

    async def ready(self, gateway: str, progress: Callable[[int, int], None]) -> None:
        """Returns when an actor can play. Raises RolloutError, UsageError: none can load the rollout."""
        async with self._beginning:
            if not self._places:
                number = self._num_wanted
                if not number:  # as many as fit on the free CPUs, between 1 and the number of attempts
                    free = (await ask_facts()).resources
                    wanted = {"CPU": self._cluster["cpus"], **self._cluster["resources"]}
                    fitting = min(int(free.get(name, 0.0) // amount) for name, amount in wanted.items())
                    number = max(1, min(fitting, self._concurrency))
                self._places = [_Place(self._make, {**self._played, "gateway": gateway}, self) for _ in range(number)]
                self._keeping = [asyncio.create_task(place.keep()) for place in self._places]
        while not any(place.is_ready for place in self._places):
            failed = [place.failure for place in self._places if place.failure is not None]
            if failed and all(not place.node or place.failure is not None for place in self._places):
                raise failed[0]  # no actor can load the rollout
            progress(sum(place.node != "" for place in self._places), len(self._places))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TELL_S)

    def _make(self) -> Any:
        import ray

        options = {
            "num_cpus": self._cluster["cpus"],
            "resources": self._cluster["resources"],
            "scheduling_strategy": "SPREAD",
            "max_concurrency": self._concurrency + MORE_CALLS,
            "max_restarts": 0,
        }
        return ray.remote(**options)(NodeActor).remote()

    def tell(self, text: str = "") -> None:
        """Shows the text about an actor whose state has changed."""
        if text:
            self._show(text)
        self._changed.set()

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError if the attempt failed or lost its actor, and RolloutError if every attempt would fail."""
        there_are = [place for place in self._places if place.is_ready]
        if not there_are:
            raise AttemptError(NODE, "no node of the cluster plays any more", is_transport=True)
        place = min(there_are, key=lambda place: place.num_playing)
        ending = await place.play(policy, scenario, is_alone=is_alone)
        if isinstance(ending, AttemptError):
            raise ending
        return ending

    async def explain_timeout(self) -> str:
        guesses = await asyncio.gather(*(place.explain_timeout() for place in self._places))
        return next(filter(None, guesses), "")

    async def close(self) -> None:
        import ray

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.gather(*(place.close() for place in self._places))
                ready = [task for task, place in zip(self._keeping, self._places, strict=True) if place.is_ready]
                if ready:
                    await asyncio.wait(ready, timeout=LAST_OUTPUT_S)
        await end(*self._keeping, timeout_s=1.0)
        for place in self._places:
            place.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(ray.shutdown), CLOSE_DEADLINE_S / 2)


class Lost(Exception):
    """Ray has lost the actor, its node, or the answer."""


class _Place:
    """One actor, placed again whenever it is lost."""

    num_playing = 0
    is_ready = False
    node = ""  # machine name after placement
    _is_closing = False
    failure: ArtError | None = None  # error from loading the rollout

    def __init__(self, make: Callable[[], Any], load: Json, owner: RayRollout) -> None:
        self._make, self._load, self._owner = make, load, owner
        self._actor: Any = None
        self._ids = itertools.count(1)

    async def keep(self) -> None:
        while not self._is_closing:
            try:
                self._actor = self._make()
                self.node = printable(await self._await("where"), limit=100)
                self._owner.tell()
                await self._ask("load", **self._load)
                self.failure, self.is_ready = None, True
                self._owner.tell()
                while not self._is_closing:  # the call fails when the actor is lost
                    text = str(await self._ask("output"))[:MAX_PRINTED]
                    self._owner.tell("".join(f"[{self.node}] {line}\n" for line in text.splitlines()))
            except Lost as lost:
                if self.is_ready:
                    log.warning("node %s is lost (%s); its attempts are played again", self.node, lost)
                self._forget()
                await asyncio.sleep(AGAIN_S)
            except Exception as error:  # raised by the rollout during loading, or by Ray
                kind = type(error) if isinstance(error, ArtError) else RolloutError
                text = str(error) if isinstance(error, ArtError) else describe(error)
                self.failure = kind(f"rollout.cluster: node {self.node or 'of the cluster'}: {text}")
                if any(place.is_ready for place in self._owner._places):
                    log.warning("%s; other nodes play", self.failure)
                self._forget()
                await asyncio.sleep(FAILED_AGAIN_S)

    def _forget(self) -> None:
        self.is_ready, self.node = False, ""
        self.kill()
        self._owner.tell()

    def kill(self) -> None:
        """Kills the actor, its child process, and all descendants. Returns immediately."""
        import ray

        if self._actor is not None:
            with contextlib.suppress(Exception):  # the cluster may be lost
                ray.kill(self._actor)
            self._actor = None

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool) -> Outcome | AttemptError:
        self.num_playing += 1
        try:
            plain = {name: getattr(policy, name) for name in ("base_url", "api_key", "model", "step")}
            return read_report(await self._ask("play", scenario=scenario, is_alone=is_alone, **plain))
        except Lost as lost:
            return AttemptError(NODE, f"node {self.node or 'it ran on'} was lost: {lost}", is_transport=True)
        except ValueError as error:
            return AttemptError("process", f"its process answered with no outcome: {error}")
        finally:
            self.num_playing -= 1

    async def explain_timeout(self) -> str:
        if self.is_ready:
            with contextlib.suppress(TimeoutError, Lost, ArtError):
                async with asyncio.timeout(EXPLAIN_DEADLINE_S):
                    return str(await self._ask("explain_timeout"))
        return ""

    async def close(self) -> None:
        """Closes the function's clients, if the actor is ready."""
        self._is_closing = True
        if self.is_ready:
            with contextlib.suppress(Lost, ArtError):
                await self._ask("close")

    async def _ask(self, method: str, **params: Any) -> Any:
        """Returns the unvalidated result of a ServedNode method. Raises the node's ArtError, Lost, or ValueError."""
        if self._actor is None:
            raise Lost("it is being placed again")
        line = encode(Call(next(self._ids), method, params))
        answer = decode(await self._await("answer", line), FROM_PROCESS)
        if isinstance(answer, Raised):
            raise error_named(answer.kind, answer.message)
        return answer.value

    async def _await(self, method: str, *given: bytes) -> Any:
        """Returns the result of an actor method. Cancellation also cancels the call on the node. Raises Lost."""
        import ray

        try:
            reference = getattr(self._actor, method).remote(*given)
            try:
                return await asyncio.wrap_future(reference.future())
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):  # the actor may be lost
                    ray.cancel(reference)
                raise
        except ray.exceptions.RuntimeEnvSetupError as error:
            why = _setup_error(message_of(error))
            raise RolloutError(f"its environment cannot be made (rollout.cluster.runtime_env): {why}") from error
        except ray.exceptions.RayError as error:
            raise Lost(_reason(error)) from error


def _setup_error(text: str) -> str:
    """Returns the line with the reason of a failed node setup: the last error from pip or Ray."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["Ray gives no reason"]
    errors = [line for line in lines if re.match(r"[\w.]*error: ", line, re.IGNORECASE)]
    return printable((errors or lines)[-1 if errors else 0], limit=300)


def _reason(error: Exception) -> str:
    """Returns Ray's reason in a few words, without object ids."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()] or [type(error).__name__]
    if any("is unavailable" in line for line in lines):
        return "it does not answer"
    telling = [line for line in lines if "because" in line or "due to" in line]
    line = re.sub(r"\b(?:Node Id: )?[0-9a-f]{32,}\b", "", (telling or lines)[0])
    return printable(" ".join(line.split()), limit=120)
