"""A backend on a port of this machine, in a thread of its own, and a client that speaks its protocol as plain JSON."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from art_cli.chat.api_keys import Keys
from art_cli.config.schema import EmbeddedEngineConfig, EngineConfig, ModelConfig, TorchLearnerConfig
from art_cli.models.loading import load_weights
from art_cli.runtime import threads
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.tinker_service import BackendService
from tests.support.models.tiny import save_tiny_base

Json = dict[str, Any]

# The SDK warns of missed heartbeats for as long as the process lives, also in the output of later tests.
logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)


def tiny_base(directory: Path) -> Base:
    """The base of 40k parameters, under the name "tiny"."""
    path = save_tiny_base(directory, hidden=32)
    weights = load_weights(ModelConfig(base=path, lora=None, dtype="float32"), path)
    return Base(weights, name="tiny", lora=None, learner=TorchLearnerConfig())


@contextlib.contextmanager
def serving(
    base: Base,
    root: Path,
    *,
    keys: tuple[str, ...] = (),
    limits: BackendLimits | None = None,
    engine: EngineConfig | None = None,
    start_s: float = 30.0,
) -> Iterator[str]:
    """Yields the server's root. It stops as it does at a signal."""
    is_ready, found = threading.Event(), {}
    engine = engine or EmbeddedEngineConfig()

    async def run() -> None:
        service = BackendService(
            base, root=root, engine=engine, keys=Keys(keys), limits=limits or BackendLimits(), logs=root
        )
        found["service"], found["loop"] = service, asyncio.get_running_loop()

        def ready(address: str) -> None:
            found["address"] = address
            is_ready.set()

        await service.run("127.0.0.1", 0, ready)

    thread = threading.Thread(target=lambda: threads.run(run()), daemon=True)
    thread.start()
    assert is_ready.wait(start_s)
    try:
        yield found["address"]
    finally:
        found["loop"].call_soon_threadsafe(found["service"].stopping.stop)
        thread.join(30)
        assert not thread.is_alive()


class Client:
    """One client process: a session, and calls that wait for their results."""

    def __init__(self, address: str, key: str = "tml-a") -> None:
        self.http = httpx.Client(base_url=f"{address}/api/v1", headers={"x-api-key": key}, timeout=30)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0.24.1")["session_id"]
        self.base_model = "tiny"
        self._models = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()

    def post(self, path: str, /, **fields: Any) -> Json:
        answer = self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    def result(self, request_id: str, *, within_s: float = 30.0) -> Json:
        deadline = time.monotonic() + within_s
        while (found := self.post("retrieve_future", request_id=request_id)).get("type") == "try_again":
            assert time.monotonic() < deadline, found
        return found

    def call(self, path: str, /, **fields: Any) -> Json:
        return self.result(self.post(path, **fields)["request_id"])

    def new_model(self, *, rank: int = 4, seed: int = 0) -> str:
        number, self._models = self._models, self._models + 1
        lora = {"rank": rank, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True}
        made = self.call(
            "create_model", session_id=self.session, model_seq_id=number, base_model=self.base_model, lora_config=lora
        )
        return str(made["model_id"])


def datum(ids: list[int], weights: list[float] | None = None) -> Json:
    """A datum of cross_entropy: each token but the first is imitated."""
    weights = weights if weights is not None else [1.0] * (len(ids) - 1)
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": ids[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": ids[1:], "dtype": "int64", "shape": [len(ids) - 1]},
            "weights": {"data": weights, "dtype": "float32", "shape": [len(ids) - 1]},
        },
    }


def passing(*data: Json, loss: str = "cross_entropy", **settings: float) -> Json:
    return {"data": list(data), "loss_fn": loss, "loss_fn_config": settings or None}


def encode(fields: Json) -> bytes:
    return msgspec.json.encode(fields)
