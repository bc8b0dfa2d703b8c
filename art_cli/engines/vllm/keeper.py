"""Runs a server for a parent that may die at any instant. A program of its own: `python keeper.py COMMAND ...`.

    stdin    a pipe whose other end only the parent holds; when it closes, the server is to end
    stdout   one line: the server's process id
    stderr   the server's log: its stdout and stderr
    exit     the server's own status; 128 + N for signal N

The server leads a session of its own, and that whole process group is gone when this program ends. The standard
library only, since it may run in any environment.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

TERM_GRACE_S = 10.0  # vLLM lets go of a GPU within a few seconds
POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    command, parent = sys.argv[1:], os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True, preexec_fn=_die_with_keeper
    )
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{server.pid}\n".encode())
    while server.poll() is None and not stops and _has_parent(parent):
        pass
    _end(server)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _die_with_keeper() -> None:
    """In the server, before it starts: should this program be killed outright, the system kills the server."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_parent(parent: int) -> bool:
    """Whether the parent still wants the server; takes POLL_S to say yes.

    The process id is asked for too: a child that the parent forked may hold the pipe open after it.
    """
    readable, _, _ = select.select([0], [], [], POLL_S)
    return os.getppid() == parent and not (readable and not os.read(0, 64))


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Nothing of the server's process group is left: asked first, killed after TERM_GRACE_S."""
    deadline = time.monotonic() + TERM_GRACE_S
    _signal(server, signal.SIGTERM)
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(server, signal.SIGKILL)
    server.wait()


def _signal(server: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
