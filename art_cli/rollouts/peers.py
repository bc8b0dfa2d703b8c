"""Peers: finds the attempt whose program makes a call.

A key does not prove which attempt makes a call, because each process can read the environment of other processes of
the same user (`/proc/PID/environ`). The gateway therefore looks up the process that opened the connection, and
refuses the call if the process belongs to another attempt. Unknown processes are accepted, because the call may come
through a container or a proxy.

The lookup works only on Linux. On other systems every call is accepted.
"""

import contextlib
import os
from collections.abc import Iterator

Address = tuple[str, int]  # host and port


class Peers:
    """The programs of the running attempts."""

    def __init__(self) -> None:
        self._programs: dict[str, int] = {}  # key -> id of the supervisor process, the ancestor of the program

    @property
    def is_empty(self) -> bool:
        return not self._programs

    def add(self, key: str, process: int) -> None:
        self._programs[key] = process

    def remove(self, key: str) -> None:
        self._programs.pop(key, None)

    def owner_of(self, client: Address, server: Address, *, expected: str) -> str | None:
        """Returns the key of the attempt whose program opened the connection.

        Checks the program for the `expected` key first. Reading /proc takes a few hundred microseconds per attempt,
        which is too slow for an event loop.
        """
        inode = _inode(client[1], server[1])
        if inode is None:
            return None
        programs = {expected: self._programs.get(expected, 0), **self._programs}
        return next((key for key, process in programs.items() if _holds(process, inode)), None)


def _inode(client_port: int, server_port: int) -> str | None:
    """Returns the inode of the client's socket for a local TCP connection."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            next(file)  # the header line
            for line in file:
                fields = line.split()
                ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
                if ports == [client_port, server_port] and fields[9] != "0":
                    return fields[9]
    return None


def _holds(process: int, inode: str) -> bool:
    """Returns whether the process or a descendant has the socket open, according to /proc."""
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
