"""Commands of this checkout in processes of their own, and the processor time that they took."""

import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.shared.paths import ROOT

DEADLINE_S = 3 * 3600.0  # longest time for one command


def python(*arguments: object, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Returns the ended process of `python ARGUMENTS`, with what it printed."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


def art(*arguments: object, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    """Returns the ended process of `art ARGUMENTS`, with what it printed."""
    return python("-m", "art_cli", *arguments, timeout_s=timeout_s)


def last_lines(done: subprocess.CompletedProcess[str], num: int = 8) -> str:
    """Returns the end of what the process wrote to stderr."""
    return "\n".join(done.stderr.strip().splitlines()[-num:])


def processor_seconds() -> float:
    """Returns the processor seconds of all processes that this one started and that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor_seconds_of(pid: int) -> float:
    """Returns the processor seconds of a process that lives, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
