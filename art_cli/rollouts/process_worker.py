"""The worker process that plays attempts; started by bootstrap.py and called by process.py.

This module and its imports need only the standard library, because the worker's Python may lack our dependencies.
When the parent closes the socket, the worker cancels its attempts and exits.
"""

import socket
import sys
from pathlib import Path
from typing import NoReturn

from art_cli.rollouts import Rollout
from art_cli.rollouts.attempt_errors import AttemptError, Json, report
from art_cli.rollouts.function_rollout import load_function
from art_cli.rollouts.policy import Policy, import_client
from art_cli.runtime import log
from art_cli.runtime.errors import ArtError, message_of
from art_cli.runtime.processes.process_server import run_and_exit, serve


def main() -> None:
    log.set_up()
    serve_and_exit(ServedFunction())


def serve_and_exit(served: "ServedRollout") -> NoReturn:
    """Answers calls at the socket from the command line, and exits when the parent closes the socket."""
    run_and_exit(_serve(socket.socket(fileno=int(sys.argv[1])), served))


async def _serve(connection: socket.socket, served: "ServedRollout") -> None:
    await serve(connection, served)
    await served.close()


class ServedRollout:
    """One rollout, with the methods that process.py calls. A subclass has `load`, which sets it."""

    _rollout: Rollout

    async def play(
        self, base_url: str, api_key: str, model: str, step: int, scenario: Json, is_alone: bool = False
    ) -> Json:
        try:
            policy = Policy(base_url=base_url, api_key=api_key, model=model, step=step)
            return report(await self._rollout.play(policy, scenario, is_alone=is_alone))
        except AttemptError as error:
            return report(error)
        except ArtError:
            raise
        except Exception as error:  # the boundary to a bug in art, which must not stop the other attempts
            return report(AttemptError(type(error).__name__, message_of(error)))

    async def explain_timeout(self) -> str:
        return await self._rollout.explain_timeout()

    async def close(self) -> None:
        if hasattr(self, "_rollout"):
            await self._rollout.close()


class ServedFunction(ServedRollout):
    async def load(self, entry: str, directory: str, environment: Json | None) -> str:
        """Loads the function, and returns the version of this Python. It blocks: modules load in the main thread."""
        self._rollout = load_function(entry, Path(directory), environment)
        if environment is None and _mentions_client(Path(directory) / entry.partition(":")[0]):
            import_client()
        return sys.version.split()[0]


def _mentions_client(file: Path) -> bool:
    """Returns whether a file's attempts use the openai package, judged by its source text.

    Many libraries that take `policy.base_url` import openai during their first call. If several threads import openai
    at the same time, Python may expose a partially initialized module to avoid a deadlock.
    """
    try:
        text = file.read_bytes()
    except OSError:  # a dotted module name
        return False
    return any(name in text for name in (b"policy.client", b"policy.sync_client", b"policy.base_url"))
