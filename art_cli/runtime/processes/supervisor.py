"""Runs one program and leaves nothing of it behind: `supervisor.py CONTROL KEEP GRACE_S PROGRAM ...`.

It is a separate process, which ChildProcess starts (child.py). It needs nothing of this package, so that it starts
in a hundredth of a second.

    CONTROL  one end of a socket pair, whose other end only the owner holds; the program's process id is written to it
    KEEP     a descriptor that the program gets besides standard input, output and error; -1: none
    GRACE_S  seconds between SIGTERM and SIGKILL when the program is ended; 0: SIGKILL at once
    exit     the program's own exit status, or the signal that ended it

The program is ended when the owner shuts its end of CONTROL down, and when the owner dies, also by SIGKILL. When the
program is over, everything that descends from it is killed.

On Linux this process is the subreaper of all that descends from it (prctl(2), PR_SET_CHILD_SUBREAPER): a process whose
parent has ended becomes a child of this one, whatever sessions and forks lie between. It kills its children until it
has none. macOS has no subreaper: there the program's process group is killed, and a descendant that made a session of
its own survives. Two cases cannot be covered: a program that kills this process, and work that a program has another
one do, such as a container that a daemon starts.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

KILL_DEADLINE_S = 4.0  # longest wait for killed processes; one in an uninterruptible wait of the system takes longer
POLL_S = 0.25  # how often the owner's life is checked by its process id
_SUBREAPER, _PARENT_DEATH, _DUMPABLE = 36, 1, 4  # prctl's options, linux/prctl.h


def main() -> None:
    control, keep, grace_s, command = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    owner = os.getppid()
    os.set_inheritable(control, False)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # wakes the poll below; a program that is started gets the defaults
    _prctl(_SUBREAPER, 1)
    _prctl(_DUMPABLE, 0)  # its environment holds a key
    program = _start(command)
    with contextlib.suppress(OSError):  # the owner is gone
        os.write(control, f"{program}\n".encode())
    if keep >= 0:
        os.close(keep)  # the other end of it shall see when the program closes its own
    status = _wait(program, control, wake, owner)
    if status is None:
        status = _terminate(program, grace_s)
    _kill_all(program)
    _end_as(status)


def _prctl(option: int, value: int) -> None:
    """Does nothing where the system has no prctl."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Returns the id of the program, in a new session, so that its signals to its group do not reach this process."""
    supervisor = os.getpid()
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        _prctl(_PARENT_DEATH, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait(program: int, control: int, wake: int, owner: int) -> int | None:
    """Returns the program's wait status when it has ended; None when it is to be ended.

    The owner's process id is looked at too, because a child that the owner forked may hold its end of CONTROL open.
    """
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
            return None  # this process was asked to end


def _terminate(program: int, grace_s: float) -> int:
    """Returns the program's wait status; SIGKILL's where it does not end within the grace period."""
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
    """Returns the program's status if it has ended; every other child that has ended is waited for as well."""
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
    """Nothing that descends from this process is left, or the deadline has passed.

    Only children are killed, because their ids cannot be another's until they are waited for; theirs are children next.
    """
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
    """Returns the process ids of this process's children; without /proc, none."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return _children_by_stat()


def _children_by_stat() -> list[int]:
    """Returns the same for a kernel that was built without the list of children."""
    own, found = str(os.getpid()), []
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _end_as(status: int) -> None:
    """Ends this process by the wait status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
