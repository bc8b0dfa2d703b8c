"""`art backend`: the Tinker protocol over an engine and a learner of this machine.

    client -> app -> requests -> models (each one's requests in order, on the device in turn) -> the learner
                              -> samplers (all at once)                                       -> an engine
                              -> futures, which the client asks for each result

A client's model is an adapter on a base that all clients share. adapter_learner.py trains it, adapter_pool.py trains it
in several processes, and datums.py has the losses that a client names. These three files import torch.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

# Ranges of the numbers that a client may send, in the types of their fields. One outside is refused when it is read.
# The limits below, the model's vocabulary and its context are narrower; they are checked where they are known. A test
# holds that each number of each request has a range.
INT32, INT64 = 2**31 - 1, 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=INT32)]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
SequenceNumber = Annotated[int, Meta(ge=0, le=INT64)]
ModelNumber = Annotated[int, Meta(ge=0, le=999_999_999)]  # the store's names of runs have at most nine digits there
TtlSeconds = Annotated[int, Meta(ge=3600, le=10 * 365 * 86400)]  # an hour to ten years
Listed = Annotated[int, Meta(ge=0, lt=10**9)]  # offset or limit of a listing
Seed = Annotated[int, Meta(ge=-INT64 - 1, le=INT64)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Setting = Annotated[float, Meta(ge=0, lt=10**6)]  # a number of AdamW's
Decay = Annotated[float, Meta(ge=0, lt=1)]  # the decay of AdamW's means


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
