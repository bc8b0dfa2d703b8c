"""`art backend`: serves the Tinker protocol with this machine's engine and learner.

    client -> app -> requests -> models (ordered requests per model; models take turns on the device) -> learner
                              -> samplers (concurrent)                                                 -> engine
                              -> futures, which the client polls for results

A client's model is an adapter on a shared base model. adapter_learner.py trains one adapter, adapter_pool.py trains
adapters in several processes, and datums.py implements the client's losses. These three files import torch.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

# Ranges of numbers in client requests, as field types. Numbers outside are rejected during decoding. The limits below,
# the model's vocabulary and context are narrower and checked later. A test ensures that every numeric request field has
# a range.
INT32, INT64 = 2**31 - 1, 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=INT32)]
Positive = Annotated[int, Meta(ge=1, le=INT32)]
SequenceNumber = Annotated[int, Meta(ge=0, le=INT64)]
ModelNumber = Annotated[int, Meta(ge=0, le=999_999_999)]  # the store's run names allow at most nine digits here
TtlSeconds = Annotated[int, Meta(ge=3600, le=10 * 365 * 86400)]  # an hour to ten years
Listed = Annotated[int, Meta(ge=0, lt=10**9)]  # offset or limit in a listing request
Seed = Annotated[int, Meta(ge=-INT64 - 1, le=INT64)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Setting = Annotated[float, Meta(ge=0, lt=10**6)]  # a parameter of AdamW
Decay = Annotated[float, Meta(ge=0, lt=1)]  # decay rate of AdamW's moments


@dataclass(frozen=True)
class BackendLimits:
    models: int = 8  # adapters in training; additional clients wait
    samplers: int = 8  # open engines; idle engines are closed to make room
    snapshots: int = 32  # unsaved weight copies for sampling, per model; the oldest is dropped
    rank: int = 128
    pending: int = 512  # unanswered requests per client
    pending_bytes: int = 2**30  # size of these requests
    samples: int = 256  # samples per request
    data: int = 4096  # data per request
    body_bytes: int = 64 * 2**20
    session_s: float = 3600.0  # seconds without a heartbeat until a session's models are unloaded
    quota_bytes: int | None = None  # maximum checkpoint bytes per client; None if unlimited
    drain_s: float = 30.0  # maximum wait for running requests when the server stops
