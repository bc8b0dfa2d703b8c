"""Runs one program and leaves nothing of it behind: `descendants.py CONTROL KEEP PROGRAM ...`, a process of its own.

`command_line` is what starts it. It needs nothing of this package, so that it starts in a hundredth of a second. The
program gets standard input, output and error, and the descriptor KEEP (-1: none). When the program ends, or the other
end of the pipe CONTROL is closed, also by a SIGKILL of its owner, everything that descends from it is killed. Then this
process ends as the program did: with its exit status, or by the signal that ended it.

On Linux this process is the subreaper of all that descends from it (prctl(2), PR_SET_CHILD_SUBREAPER): a process whose
parent has ended becomes a child of this one, whatever sessions and forks lie between. It kills its children until it
has none. Elsewhere (macOS) there is no subreaper: the program's process group is killed, and what has left the group
with a session of its own survives. What nobody can catch: a program that kills this process, and what it has others
start, such as a container through a daemon.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

KILL_DEADLINE_S = 4.0  # for killed processes to be gone; one in an uninterruptible wait of the system may not be
_SUBREAPER, _PARENT_DEATH, _DUMPABLE = 36, 1, 4  # prctl's options, linux/prctl.h


def command_line(control: int, command: list[str], *, keep: int = -1) -> list[str]:
    """What runs `command` under a process of this file. Pass it the descriptors `control` and, if any, `keep`."""
    return [sys.executable, "-I", "-S", __file__, str(control), str(keep), *command]


def main() -> None:
    control, keep, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(control, False)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # wakes the poll below; a program that is started gets the defaults
    _prctl(_SUBREAPER, 1)
    _prctl(_DUMPABLE, 0)  # its environment holds a key
    program = _start(command, control)
    if keep >= 0:
        os.close(keep)  # the program's alone: whoever reads its other end sees when the program closes it
    status = _wait(program, control, wake)
    _kill_all(program)
    _end_as(status)


def _prctl(option: int, value: int) -> None:
    """Does nothing where the system has no prctl."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str], control: int) -> int:
    """The process id of the program, in a session of its own: what it sends its group does not reach this process."""
    supervisor = os.getpid()
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        _prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait(program: int, control: int, wake: int) -> int:
    """The program's wait status once it has ended; SIGKILL's where the owner let go of it before."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        if (status := _reap(program)) is not None:
            return status
        ready = dict(poll.poll())
        if control in ready:
            return signal.SIGKILL
        if wake in ready and set(os.read(wake, 4096)) - {signal.SIGCHLD}:
            return signal.SIGKILL  # somebody asks this process to end


def _reap(program: int) -> int | None:
    """Takes note of every child that has ended; the program's status if it is one of them."""
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

    Only children are killed, whose ids cannot be another's until they are waited for; theirs are children next.
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
    """The process ids of this process's children; without /proc, none."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return _children_by_stat()


def _children_by_stat() -> list[int]:
    """As `_children`, for a kernel that was built without the list."""
    own, found = str(os.getpid()), []
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def _end_as(status: int) -> None:
    """Ends this process as the wait status says."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
