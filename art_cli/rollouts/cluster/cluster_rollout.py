"""ClusterRollout: the user's rollout on the nodes of a Ray cluster, seen from the training process.

It communicates only with its child process, Ray's driver (ray_driver.py). If Ray loses the cluster and the driver
exits, running attempts fail as `node` errors and are retried once another driver has found the cluster. Without a
cluster, the run ends with an error message and can be resumed.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from art_cli.config.schema import RolloutConfig, RunConfig
from art_cli.rollouts.attempt_errors import NODE, AttemptError, Json
from art_cli.rollouts.cluster.ray_driver import ClusterFacts
from art_cli.rollouts.function_rollout import what_to_load
from art_cli.rollouts.policy import Policy
from art_cli.rollouts.process import RolloutProcess
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import RolloutError, UsageError, printable
from art_cli.runtime.processes.process_calls import checked
from art_cli.runtime.secrets import load_environment

log = logging.getLogger(__name__)

TELL_S = 10.0  # interval of log lines about waiting attempts
MAX_TAIL = 4096  # bytes of Ray's last words
WILDCARDS = ("0.0.0.0", "::", "")  # hosts that mean every address of this machine
DRIVER = "cluster.ray_driver"


class _Driver(RolloutProcess):
    verb = "connected"


class ClusterRollout:
    """Plays attempts on a cluster. `connect` first, then `open` with the gateway's address."""

    def __init__(self, config: RolloutConfig, played: Json, *, directory: Path, runs: Path) -> None:
        """`played` is the rollout, as the parameters of ServedNode.load."""
        assert config.cluster is not None
        self._config = config.cluster
        project = {"directory": str(directory.resolve()), "runs": str(runs.resolve())}
        variables = _variables("rollout.cluster.env", self._config.env, directory)
        variables |= _variables("rollout.env", config.env, directory)
        what = {
            "cluster": self._config.model_dump(mode="json"),
            "project": project,
            "played": {**played, "variables": variables},
            "processes": config.processes if "processes" in config.model_fields_set else None,
            "concurrency": config.most_at_once,
        }
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (what Ray writes to standard error)
        self._driver = _Driver(
            "rollout.cluster",
            what,
            python=self._config.python,
            key="rollout.cluster.python",
            module=DRIVER,
            errors=self._words,
        )
        self._gateway = ""
        self._told = 0.0

    async def connect(self) -> ClusterFacts:
        """Returns the cluster's facts. Raises UsageError or RolloutError if the cluster is missing or unusable."""
        await self._start()
        try:
            facts: ClusterFacts = checked(ClusterFacts, await self._driver.ask("facts"))
        except ValueError as error:
            raise RolloutError(f"rollout.cluster: its driver answers with no facts: {error}") from error
        return facts

    def open(self, host: str, port: int | None) -> None:
        """Stores the gateway address for the nodes, unless the configuration sets one."""
        address = f"[{host}]" if ":" in host else host
        self._gateway = self._config.gateway_url or f"http://{address}:{port}"

    async def ready(self) -> float:
        """Returns the seconds waited for an actor. Raises RolloutError if none was placed or no cluster answers."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(self._config.wait_s):
                while True:
                    await self._start()
                    with contextlib.suppress(AttemptError):  # the driver ended
                        await self._driver.ask("ready", progress=self._tell, gateway=self._gateway)
                        return time.monotonic() - begin
        except TimeoutError:
            limit = f"{self._config.wait_s:g} s (rollout.cluster.wait_s)"
            cure = "run the same command again to resume when there is room"
            raise RolloutError(f"rollout.cluster: no place in the cluster was free for {limit}; {cure}") from None

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError if this attempt failed or lost its node, and RolloutError if every attempt would fail."""
        there = Policy(base_url=f"{self._gateway}/v1", api_key=policy.api_key, model=policy.model, step=policy.step)
        try:
            return await self._driver.play(there, scenario, is_alone=is_alone)
        except AttemptError as error:
            if error.is_transport and error.kind == "process" and not self._driver.is_running:
                message = f"the connection to the cluster was lost: {error.message}"
                raise AttemptError(NODE, message, is_transport=True) from error
            raise

    async def explain_timeout(self) -> str:
        return await self._driver.explain_timeout()

    async def close(self) -> None:
        """Stops all actors of this run. May be called twice."""
        await self._driver.close()
        self._words.close()

    async def _start(self) -> None:
        if not self._driver.is_running:
            self._words.seek(0)
            self._words.truncate()
        try:
            await self._driver.start()
        except RolloutError as error:
            raise RolloutError(f"{error}{self._last_words()}") from error

    def _tell(self, placed: int, wanted: int) -> None:
        if time.monotonic() - self._told >= TELL_S:
            if self._told:
                log.info("rollouts wait for a place in the cluster: %d of %d processes are placed", placed, wanted)
            self._told = time.monotonic()

    def _last_words(self) -> str:
        """Returns Ray's last log line before the driver exited by itself; empty if Ray wrote nothing."""
        if self._driver.is_running:
            return ""
        end = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, end - MAX_TAIL))
        lines = self._words.read().decode(errors="replace").split("\n")
        fatal = [line for line in lines if "GCS" in line or "raylet" in line]
        return f" ({printable(fatal[-1].rpartition('] ')[2], limit=200)})" if fatal else ""


@contextlib.asynccontextmanager
async def serve_cluster(config: RunConfig, directory: Path, gateway: Gateway) -> AsyncIterator[ClusterRollout]:
    """Yields the rollout while connected, and the gateway on the cluster's address (unless gateway.host is set)."""
    rollout = cluster_rollout(config, directory)
    try:
        facts = await rollout.connect()
        own = config.gateway.host if "host" in config.gateway.model_fields_set else facts.host
        async with gateway.serve(own, config.gateway.port) as url:
            rollout.open(facts.host if own in WILDCARDS else own, urlsplit(url).port)
            yield rollout
    finally:
        await rollout.close()


def cluster_rollout(config: RunConfig, directory: Path) -> ClusterRollout:
    """Returns the rollout for a configuration with a cluster. Raises UsageError if a variable is missing."""
    chosen = config.rollout
    entry, environment = what_to_load(chosen) if chosen.command is None else (None, None)
    played = {"entry": entry, "environment": environment, "command": chosen.command}
    return ClusterRollout(chosen, played, directory=directory, runs=config.runs)


def _variables(key: str, names: list[str], directory: Path) -> dict[str, str]:
    """Returns the environment variables for the nodes. Raises UsageError if a variable is missing."""
    if names:
        load_environment(directory)
    for name in names:
        if name not in os.environ:
            raise UsageError(f"{key}: {name} is not set; set it in the environment, or in a file .env")
    return {name: os.environ[name] for name in names}
