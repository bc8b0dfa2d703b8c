"""NodeSetup: a machine's position among a learner's nodes; addresses, ports and interfaces; the shared secret.

The secret comes from the environment. It never appears in files, logs or messages.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from art_cli.runtime.errors import UsageError

SIOCGIFADDR = 0x8915  # ioctl request for an interface's IPv4 address, linux/sockios.h
VARIABLE = "ART_NODES_SECRET"
MIN_LENGTH = 16  # characters; an eavesdropper could guess a shorter secret
CURE = f"set {VARIABLE} to the same value on every node, such as the output of `openssl rand -hex 32`"


class NodeSetup(NamedTuple):
    """Example: NodeSetup(node=1, nodes=2, host="10.0.0.4", port=41203, interface="eth0")"""

    node: int = 0
    nodes: int = 1
    host: str = "127.0.0.1"  # first node's host name or address, where torch's store is
    port: int = 0  # port of torch's store; 0: not known yet
    interface: str = ""  # this machine's network interface to the other nodes; "": torch chooses


class Address(NamedTuple):
    """The address where nodes meet. Example: Address("10.0.0.4", 29500)"""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parses HOST:PORT, already validated by the configuration; IPv6 addresses are in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def is_loopback(self) -> bool:
        """Returns whether only this machine can reach it. Raises OSError for an unknown host."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(info[4][0]).split("%")[0]).is_loopback for info in found)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port that no other program is assigned during the block.

    torch's store can still listen on it, because both sockets set SO_REUSEADDR and this socket does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def interface_of(host: str) -> str:
    """Returns the network interface with `host`'s IPv4 address; "" if the system does not report it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        wanted = socket.gethostbyname(host)
        if ipaddress.ip_address(wanted).is_loopback:  # any address in 127.0.0.0/8
            wanted = "127.0.0.1"
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                given = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(given[20:24]) == wanted:
                    return name
    return ""


def keep_alive(connection: socket.socket) -> None:
    """Enables TCP keepalive: a vanished peer is noticed within half a minute, even without traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, option):  # macOS uses other names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def read_secret(address: Address) -> bytes:
    """Returns the secret; empty if unset and only this machine can reach the address.

    Raises UsageError if a required secret is missing or too short, or the address cannot be resolved.
    """
    secret = os.environ.get(VARIABLE, "")
    try:
        is_loopback = address.is_loopback()
    except OSError as error:
        raise UsageError(f"learner.rendezvous: {address.host}: {error.strerror or error}") from error
    if not secret and not is_loopback:
        raise UsageError(f"learner.rendezvous: {address} is open to other machines and needs a secret; {CURE}")
    if secret and len(secret) < MIN_LENGTH:
        raise UsageError(f"{VARIABLE} has fewer than {MIN_LENGTH} characters; {CURE}")
    return secret.encode()
