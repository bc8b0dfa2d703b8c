"""The attempt whose program makes a call.

A key alone does not show it, because programs of one user can read each other's keys: the environment of a program
(`/proc/PID/environ`) is open to every process of the same user. The gateway therefore looks at the process that holds
the other end of a connection. If that process belongs to another attempt than the key does, the call is refused. A
connection that belongs to no attempt's program is let through, because it may come from a container or a proxy that the
program uses. All this works on Linux only; elsewhere every call is let through.
"""

import contextlib
import os
from collections.abc import Iterator

Address = tuple[str, int]  # host and port


class Peers:
    """The programs of the attempts that run."""

    def __init__(self) -> None:
        self._programs: dict[str, int] = {}  # key -> id of the process that all of the program descends from

    @property
    def is_empty(self) -> bool:
        return not self._programs

    def add(self, key: str, process: int) -> None:
        self._programs[key] = process

    def remove(self, key: str) -> None:
        self._programs.pop(key, None)

    def thief(self, key: str, client: Address, server: Address) -> str | None:
        """Returns the key of the attempt whose program makes a call with another attempt's `key`; None if none does.

        It reads files of /proc, which takes some hundred microseconds for each attempt, too long for an event loop.
        """
        inode = _inode(client[1], server[1])
        programs = dict(self._programs)
        if inode is None or _holds(programs.pop(key, 0), inode):
            return None
        return next((other for other, process in programs.items() if _holds(process, inode)), None)


def _inode(client_port: int, server_port: int) -> str | None:
    """Returns the inode of the client's end of a TCP connection on this machine; None without such a connection."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            next(file)  # the head
            for line in file:
                fields = line.split()
                ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
                if ports == [client_port, server_port] and fields[9] != "0":
                    return fields[9]
    return None


def _holds(process: int, inode: str) -> bool:
    """Returns whether the process or a descendant has the socket open; False where /proc does not show it."""
    link = f"socket:[{inode}]"
    return any(link == opened for descendant in _tree(process) for opened in _open_files(descendant))


def _tree(process: int) -> Iterator[int]:
    waiting = [process] if process else []
    while waiting:
        first = waiting.pop()
        yield first
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{first}/task"):
                with open(f"/proc/{first}/task/{task}/children") as file:
                    waiting += map(int, file.read().split())


def _open_files(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{process}/fd/{descriptor}")
