"""A process that plays attempts at the user's function; start.py begins it, process.py calls it.

Standard library only, here and in all that is imported, because its Python may have none of our dependencies.
When the other end of its socket closes, this process cancels what it plays and ends.
"""

import socket
import sys
from pathlib import Path

from art_cli import log
from art_cli.errors import ArtError, message_of
from art_cli.processes.serve import run_and_exit, serve
from art_cli.rollouts.attempt import AttemptError
from art_cli.rollouts.function import FunctionRollout, load_function
from art_cli.rollouts.messages import Json, report
from art_cli.rollouts.policy import Policy


def main() -> None:
    log.set_up()
    run_and_exit(_serve(socket.socket(fileno=int(sys.argv[1]))))


async def _serve(connection: socket.socket) -> None:
    served = ServedRollout()
    await serve(connection, served)
    await served.close()


class ServedRollout:
    """One function, with the methods that process.py calls."""

    _rollout: FunctionRollout

    async def load(self, entry: str, directory: str, environment: Json | None) -> str:
        """The version of this Python, when it has loaded the function. It blocks: modules load in the main thread."""
        self._rollout = load_function(entry, Path(directory), environment)
        return sys.version.split()[0]

    async def play(self, base_url: str, api_key: str, model: str, step: int, scenario: Json) -> Json:
        try:
            policy = Policy(base_url=base_url, api_key=api_key, model=model, step=step)
            return report(await self._rollout.play(policy, scenario))
        except AttemptError as error:
            return report(error)
        except ArtError:
            raise
        except Exception as error:  # the boundary to a defect of ours, which must not end the other attempts here
            return report(AttemptError(type(error).__name__, message_of(error)))

    async def explain_timeout(self) -> str:
        return await self._rollout.explain_timeout()

    async def close(self) -> None:
        if hasattr(self, "_rollout"):
            await self._rollout.close()
