"""The secret that the nodes of a learner share, from the environment. It is in no file, log or message."""

import os

from art_cli.learners.processes.nodes.node_address import Address
from art_cli.runtime.errors import UsageError

VARIABLE = "ART_NODES_SECRET"
MIN_LENGTH = 16  # characters; who listens on the network could guess a shorter one
CURE = f"set {VARIABLE} to the same value on every node, such as that of `openssl rand -hex 32`"


def read_secret(address: Address) -> bytes:
    """Returns the secret; empty if none is needed as only this machine reaches the address. Raises UsageError.

    A rendezvous that cannot be resolved is a UsageError too.
    """
    secret = os.environ.get(VARIABLE, "")
    try:
        is_loopback = address.is_loopback()
    except OSError as error:
        raise UsageError(f"learner.rendezvous: {address.host}: {error.strerror or error}") from error
    if not secret and not is_loopback:
        raise UsageError(f"learner.rendezvous: {address} is open to other machines and there is no secret; {CURE}")
    if secret and len(secret) < MIN_LENGTH:
        raise UsageError(f"{VARIABLE} has fewer than {MIN_LENGTH} characters; {CURE}")
    return secret.encode()
