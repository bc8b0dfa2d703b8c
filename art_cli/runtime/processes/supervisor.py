"""Runs a program and cleans up its whole process tree: `supervisor.py CONTROL KEEP GRACE_S PROGRAM ...`.

ChildProcess (child.py) starts this as a separate process. It imports nothing from this package, so it starts in 10 ms.

    CONTROL  a socket pair's end; only the owner has the peer end. The program's process id is written to it
    KEEP     a descriptor for the program in addition to standard input, output and error; -1: none
    GRACE_S  seconds between SIGTERM and SIGKILL; 0: SIGKILL immediately
    exit     with the program's exit status or signal

The program is ended when the owner shuts down CONTROL or dies, even by SIGKILL. After the program's end, all its
descendants are killed.

On Linux this process is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): orphaned descendants become its children,
regardless of sessions and forks. It kills its children until none remain. macOS lacks subreapers. There, the program's
process group is killed, and descendants in separate sessions survive. Two cases are not covered: a program that kills
this process, and work delegated to another process, such as a container started by a daemon.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

KILL_DEADLINE_S = 4.0  # timeout for killed processes; uninterruptible system calls take longer
POLL_S = 0.25  # polling interval for the owner's process id
_SUBREAPER, _PARENT_DEATH, _DUMPABLE = 36, 1, 4  # prctl's options, linux/prctl.h


def main() -> None:
    control, keep, grace_s, command = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    owner = os.getppid()
    os.set_inheritable(control, False)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # wakes the poll below; the started program gets the defaults
    _prctl(_SUBREAPER, 1)
    _prctl(_DUMPABLE, 0)  # its environment contains a key
    program = _start(command)
    with contextlib.suppress(OSError):  # the owner is dead
        os.write(control, f"{program}\n".encode())
    if keep >= 0:
        os.close(keep)  # the peer must notice when the program closes its copy
    status = _wait(program, control, wake, owner)
    if status is None:
        status = _terminate(program, grace_s)
    _kill_all(program)
    _end_as(status)


def _prctl(option: int, value: int) -> None:
    """Has no effect on systems without prctl."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Returns the program's id. It runs in a new session, so signals to its group do not reach this process."""
    supervisor = os.getpid()
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        _prctl(_PARENT_DEATH, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit this
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait(program: int, control: int, wake: int, owner: int) -> int | None:
    """Returns the program's wait status, or None when asked to stop it or when the owner is dead."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        if (status := _reap(program)) is not None:
            return status
        ready = dict(poll.poll(POLL_S * 1000))
        if control in ready or os.getppid() != owner:
            return None
        if wake in ready and set(os.read(wake, 4096)) - {signal.SIGCHLD}:
            return None  # this process was asked to stop


def _terminate(program: int, grace_s: float) -> int:
    """Ends the program and returns its wait status; SIGKILL after the grace period."""
    deadline = time.monotonic() + grace_s
    if grace_s > 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGTERM)
    while time.monotonic() < deadline:
        if (status := _reap(program)) is not None:
            return status
        time.sleep(0.02)
    return signal.SIGKILL


def _reap(program: int) -> int | None:
    """Reaps ended children. Returns the program's status, or None while it runs."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        status = ended if pid == program else status


def _kill_all(program: int) -> None:
    """Kills all children, whose ids cannot be reused, until none remain or the deadline passes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.001)


def _children() -> list[int]:
    """Returns the process ids of this process's children; [] without /proc."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return _children_by_stat()


def _children_by_stat() -> list[int]:
    """Returns the children on kernels built without the children file."""
    own, found = str(os.getpid()), []
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _end_as(status: int) -> None:
    """Ends this process like the wait status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
