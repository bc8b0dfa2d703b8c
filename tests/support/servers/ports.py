"""Ports for servers that are told theirs before they listen."""

import random
import socket

EPHEMERAL = 32768  # from here on Linux gives ports to whoever asks for any; those below are given to nobody


def free_port() -> int:
    """A port on which nothing listens, and which no other process is given by chance before it is used."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20000, EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
