"""`art backend`: the Tinker protocol over an engine and a learner of this machine.

    client -> app -> requests -> models (each one's requests in order, on the device in turn) -> the learner
                              -> samplers (all at once)                                       -> an engine
                              -> futures, which the client asks for each result

A client's model is an adapter on a base that all clients share. Nothing here imports torch before it serves.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendLimits:
    """The most that one server holds and answers."""

    models: int = 8  # adapters in training at once; further clients wait
    samplers: int = 8  # engines that are ready at once; idle ones make room
    snapshots: int = 32  # unsaved copies of weights that are sampled from, of one model; the oldest goes first
    rank: int = 128
    pending: int = 512  # unanswered requests of one client
    pending_bytes: int = 2**30  # numbers of these
    samples: int = 256  # samples of one request
    data: int = 4096  # data of one request
    body_bytes: int = 64 * 2**20
    session_s: float = 3600.0  # longest time without a heartbeat before a session's models are unloaded
    quota_bytes: int | None = None  # checkpoints of one client, or None for no limit
    drain_s: float = 30.0  # longest wait for running work when the server stops
