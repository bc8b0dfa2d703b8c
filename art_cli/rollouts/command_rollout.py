"""CommandRollout: an external program in any language as a rollout.

The program reads the scenario as one JSON line from standard input. Its environment has OPENAI_BASE_URL,
OPENAI_API_KEY, and OPENAI_MODEL, and ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, and ANTHROPIC_MODEL for Anthropic's
clients. From art's environment, which holds API keys, the program gets only the variables in USUAL and the variables
that the configuration names. The last line of its standard output is the outcome: a number, null, or
`{"reward": 1.0, "metrics": {...}, "metadata": {...}}`.

The program runs in a new session under a supervisor process, which kills all descendants when the rollout ends
(runtime/processes/supervisor.py). This module needs only the standard library, because cluster nodes may have nothing
else installed.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from art_cli.rollouts.attempt_errors import MAX_ERROR_LENGTH, AttemptError, Json, describe_exit
from art_cli.rollouts.peers import Peers
from art_cli.rollouts.policy import Policy, past_proxies, read_outcome
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import RolloutError, message_of
from art_cli.runtime.processes.child import Finished, child_environment, run_program
from art_cli.runtime.processes.plain_json import dump

# Variables that a program needs to start and make calls. They contain no keys.
USUAL = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
     "SYSTEMROOT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "NODE_PATH", "LD_LIBRARY_PATH",
     "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
     "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
)  # fmt: skip
MAX_NAMED = 5  # maximum withheld variables named in an error


class CommandRollout:
    """Runs a command in `directory`. Raises RolloutError if the program or a variable is missing."""

    def __init__(
        self, command: Sequence[str], *, directory: Path, env: Sequence[str] = (), peers: Peers | None = None
    ) -> None:
        """`env` lists variables to pass in addition to USUAL."""
        if missing := [name for name in env if name not in os.environ]:
            raise RolloutError(f"rollout.env: {missing[0]} is not set; set it in the environment, or in a file .env")
        self._env = frozenset(env)
        self._peers = peers if peers is not None else Peers()
        self._command = list(command)
        self._directory = directory
        self._entry = "rollout.command"
        self._has_played = False  # after a valid outcome, an invalid outcome fails only its own attempt
        program = command[0]
        is_path = os.sep in program
        found = shutil.which(directory / program if is_path else program)
        if found is None:
            raise RolloutError(f"{self._entry}: no such program: {program!r}; install it or give its path")
        self._program = found

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError if the program failed, and RolloutError if its first outcome has a wrong type."""
        passed = {name: value for name, value in child_environment().items() if is_passed(name, self._env)}
        environment = {
            **passed,
            **past_proxies(policy.base_url),
            "OPENAI_BASE_URL": policy.base_url,
            "OPENAI_API_KEY": policy.api_key,
            "OPENAI_MODEL": policy.model,
            "ANTHROPIC_BASE_URL": policy.anthropic_base_url,
            "ANTHROPIC_API_KEY": policy.api_key,
            "ANTHROPIC_MODEL": policy.model,
        }
        environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # clients prefer it to the key
        withheld = sorted(os.environ.keys() - passed.keys() - environment.keys())
        try:
            ended = await run_program(
                self._command,
                dump(scenario) + b"\n",
                cwd=self._directory,
                environment=environment,
                on_start=lambda child: self._peers.add(policy.api_key, child.supervisor_pid),
            )
        except OSError as error:  # the system lacks memory, descriptors or room, or the program has lost its permission
            kind = "output" if error.errno == errno.EFBIG else "start"
            raise AttemptError(kind, f"{self._command[0]}: {message_of(error)}") from error
        finally:
            self._peers.remove(policy.api_key)
        if ended.status != 0:
            raise AttemptError("exit", _describe(ended, withheld, self._program))
        try:
            outcome = self._read(ended.stdout)
        except RolloutError as error:
            if self._has_played:
                raise AttemptError("output", str(error)) from error
            raise
        self._has_played = True
        return outcome

    async def explain_timeout(self) -> str:
        return ""

    async def close(self) -> None:
        return None

    def _read(self, stdout: bytes) -> Outcome:
        line = stdout.rstrip().rpartition(b"\n")[2]
        try:
            value = json.loads(line.decode(), parse_constant=_finite, parse_float=_finite)
            dump(value)  # raises ValueError for half a surrogate pair
        except (ValueError, RecursionError) as error:
            shown = line[:200].decode(errors="replace")
            message = f"the last line of standard output must be a number or a JSON object, not {shown!r}"
            raise AttemptError("output", message) from error
        return read_outcome(self._outcome(value), entry=self._entry)

    def _outcome(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.name for field in fields(Outcome)]
        if unknown := value.keys() - set(known):
            listed = ", ".join(known)
            raise RolloutError(f"{self._entry}: unknown key {sorted(unknown)[0]!r} in the outcome; it has {listed}")
        return Outcome(**value)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits} is not JSON, or larger than any float")
    return value


def is_passed(name: str, env: Collection[str]) -> bool:
    return name in env or name in USUAL or name.startswith("LC_")


def _describe(ended: Finished, withheld: Sequence[str], program: str) -> str:
    """Describes a failed program: exit status, the last lines of stderr, and advice about its path or variables."""
    tail = ended.stderr[-MAX_ERROR_LENGTH // 2 :].decode(errors="replace").strip()
    status = f"{describe_exit(ended.status)}: {tail}" if tail else describe_exit(ended.status)
    if "ModuleNotFoundError: " in tail:
        return f"{status} (the program is {program}; if this is another Python, name yours in rollout.command)"
    if not withheld or ended.status < 0:  # signals have other causes
        return status
    named = [name for name in withheld if re.search(rf"\b{re.escape(name)}\b", tail)][:MAX_NAMED]
    if named:
        return f"{status} (withheld from the program; to pass it on: rollout.env=[{','.join(named)}])"
    return f"{status} (it has not got {len(withheld)} of art's variables; rollout.env=[NAME] passes one on)"
