"""Models: adapters in training, each with a learner. Turns: runs a model's requests in numerical order.

A client numbers its requests 1, 2, 3, ... and sends several concurrently, so they may arrive in any order. A request
waits for missing predecessors, and each request runs once. All models share a device and take turns.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.learners.optimizer import Adam
from art_cli.runtime import threads
from art_cli.runtime.errors import LearnerError
from art_cli.tinker.server import BackendLimits, Decay, Setting, passes
from art_cli.tinker.server.adapter_learner import Passed
from art_cli.tinker.server.base_model import Base, ClientLearner, Parts, lora_of, parts_of
from art_cli.tinker.server.checkpoint_store import Notes, Place, RunNotes, Store, check_metadata
from art_cli.tinker.server.futures import SMALL, Failure, Future, FutureAnswer, Futures, plain_answer
from art_cli.tinker.server.samplers import Samplers

MAX_AHEAD = 4096  # maximum distance between a request's number and the next number to run
Work = Callable[[], Coroutine[Any, Any, FutureAnswer]]


class Turns:
    """The ordered requests of the model `name`."""

    def __init__(self, name: str, futures: Futures, device: asyncio.Lock) -> None:
        self.name = name
        self._futures, self._device = futures, device
        self._next = 1
        self._newest = 0  # highest number seen
        self._waiting: dict[int, tuple[Future, Work]] = {}
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._is_closed = False

    def submit(self, number: int | None, owner: str, digest: bytes, work: Work, num_bytes: int = 0) -> Future:
        """Returns the future of request `number`, by default the next. Raises ChatError for a used or far number."""
        if self._is_closed:
            raise ChatError(404, f"{self.name}: the model was unloaded")
        number = self._newest + 1 if number is None else number
        if not 1 <= number < self._next + MAX_AHEAD:
            raise invalid(f"seq_id {number}: the next request of this model is number {self._next}")
        id = f"{self.name}:{number}"
        future, is_new = self._futures.add(id, owner, digest, is_owed=number == self._next, num_bytes=num_bytes)
        if not is_new:
            return future
        if number < self._next:  # already run, and its answer was dropped
            self._futures.settle(future, Failure("this request was run, and its answer has been dropped", True))
            return future
        self._waiting[number] = future, work
        self._newest = max(self._newest, number)
        if number > self._next:
            future.waits_for = f"request {self._next} of this model has not arrived"
        self._arrived.set()
        return future

    async def _run(self) -> None:
        while True:
            if self._next not in self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            future, work = self._waiting[self._next]
            future.waits_for = "requests of other models are before it"
            async with self._device:
                future.waits_for = ""
                running = asyncio.create_task(self._futures.run(future, work()))
                try:
                    # Finish the running request, because its thread cannot be interrupted.
                    await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait((running,))
                    raise
            del self._waiting[self._next]
            self._next += 1

    async def close(self) -> None:
        """Finishes the running request. Waiting requests fail."""
        self._is_closed = True
        self._task.cancel()
        await asyncio.wait((self._task,))
        for future, _ in self._waiting.values():
            self._futures.settle(future, Failure("the model was unloaded before this request was run", is_users=False))
        self._waiting.clear()


class AdamParams(msgspec.Struct, forbid_unknown_fields=True):
    learning_rate: Setting = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Setting = 1e-12
    weight_decay: Setting = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=-(10**6), le=10**6)] = 0.0  # values up to 0 disable clipping


class NewModel(NamedTuple):
    """A new model: a new adapter, or a saved one."""

    session: str
    number: int
    rank: int = 32
    seed: int = 0
    parts: Parts = Parts()
    source: Place | None = None  # checkpoint to start from
    with_optimizer: bool = False
    user_metadata: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        return f"{self.session}:train:{self.number}"


class SaveTo(NamedTuple):
    at: Place
    notes: Notes
    overwrites: bool = False


class Model:
    def __init__(self, run: RunNotes, learner: ClientLearner, turns: Turns) -> None:
        self.run, self.learner, self.turns = run, learner, turns
        self.used = time.time()  # time of the last request
        self.has_failed = False  # a pass failed, so the accumulated gradient is incomplete


class Models:
    def __init__(self, base: Base, store: Store, samplers: Samplers, futures: Futures, limits: BackendLimits) -> None:
        self.base, self.store, self.samplers, self.futures, self.limits = base, store, samplers, futures, limits
        self.models: dict[str, Model] = {}
        self._device = asyncio.Lock()
        self._room = asyncio.Semaphore(limits.models)
        self._owed: dict[str, Future] = {}  # requests for models that wait for capacity
        self._making: dict[str, bool] = {}  # models being created -> True if their session ended in the meantime

    def get(self, id: str, owner: str) -> Model:
        """Returns the client's model. Raises ChatError 404 for unknown models."""
        found = self.models.get(id)
        if found is None or found.run.owner != owner:
            raise ChatError(404, f"no model {id[:200]!r}; it was unloaded, or the server was restarted")
        found.used = time.time()
        return found

    # --- coming and going ---------------------------------------------------------------------------------------------

    def create(self, new: NewModel, owner: str, digest: bytes) -> str:
        """Returns the id of the creation request. Raises ChatError 400 if rank or metadata are out of bounds."""
        rank = new.rank
        if new.source is not None:
            path = self.store.readable(new.source, owner)
            rank = 1 if self.base.is_whole else lora_of(path).rank
        if not 1 <= rank <= self.limits.rank:
            raise invalid(f"lora_config.rank {rank}: between 1 and {self.limits.rank}")
        check_metadata(new.user_metadata)
        future, is_new = self.futures.add(f"{new.id}:0", owner, digest)
        if is_new:
            future.waits_for = f"the server trains {self.limits.models} models at once" if self._room.locked() else ""
            self.futures.start(future, self._create(new, owner))
            self._owed[new.id] = future
        return future.id

    def give_up(self, session: str) -> None:
        """Cancels a session's pending models. A model under construction is closed once complete."""
        for id, future in list(self._owed.items()):
            if id.startswith(f"{session}:"):
                self.futures.cancel(future)
        self._making |= {id: True for id in self._making if id.startswith(f"{session}:")}

    async def _create(self, new: NewModel, owner: str) -> FutureAnswer:
        try:
            await self._room.acquire()
        finally:
            self._owed.pop(new.id, None)
        self._making[new.id] = False
        try:
            async with self._device:
                learner = await threads.compute(self._make_learner, new, owner)
            run = RunNotes(
                id=new.id,
                owner=owner,
                base_model=self.base.name,
                rank=learner.rank,
                created=time.time(),
                user_metadata=new.user_metadata,
            )
            try:
                await threads.call_in_thread(self.store.add_run, run)
                if self._making[new.id]:
                    raise ChatError(404, f"{new.id}: its session ended before it was made")
            except BaseException:
                async with self._device:
                    await threads.compute(learner.close)
                raise
        except BaseException:
            self._room.release()
            raise
        finally:
            del self._making[new.id]
        self.models[new.id] = Model(run, learner, Turns(new.id, self.futures, self._device))
        kind = "create_model" if new.source is None else "load_weights"
        return plain_answer({"model_id": new.id, "type": kind, **({"path": new.source.uri} if new.source else {})})

    def _make_learner(self, new: NewModel, owner: str) -> ClientLearner:
        if new.source is None:
            return self.base.new_learner(new.rank, new.seed, new.parts)
        path = self.store.find(new.source, owner)
        learner = self.base.saved_learner(path)
        try:
            _load(learner, path, new.with_optimizer)
        except BaseException:
            learner.close()
            raise
        return learner

    async def unload(self, id: str, owner: str) -> None:
        model = self.get(id, owner)
        del self.models[id]
        try:
            await model.turns.close()
            await self.samplers.forget(id)
        finally:
            try:
                async with self._device:
                    await threads.compute(model.learner.close)
            finally:
                self._room.release()

    async def close(self) -> None:
        for model in list(self.models.values()):
            await model.turns.close()

    # --- requests to a model ------------------------------------------------------------------------------------------

    def run_pass(self, asked: passes.ForwardBackward, owner: str, digest: bytes) -> str:
        """Returns the request id. Invalid requests fail later, in their turn."""
        model = self.get(asked.model_id, owner)
        bounds = {"vocabulary": self.base.vocabulary, "max_length": self.base.max_length, "max_data": self.limits.data}

        def run() -> tuple[passes.Checked, Passed]:
            checked = passes.check(asked, **bounds)
            return checked, model.learner.run(checked.data, asked.loss, asked.settings, backward=asked.backward)

        async def work() -> FutureAnswer:
            try:
                checked, passed = await threads.compute(run)
            except BaseException:
                model.has_failed = model.has_failed or asked.backward
                raise
            size = SMALL + sum(each.nbytes for each in passed.logprobs)
            return FutureAnswer(
                partial(passes.as_json, passed, checked.is_flat),
                partial(passes.as_proto, passed, checked.is_flat),
                size,
            )

        return model.turns.submit(asked.seq_id, owner, digest, work, asked.num_bytes).id

    def update(self, id: str, seq_id: int | None, adam: AdamParams, owner: str, digest: bytes) -> str:
        model = self.get(id, owner)

        def update() -> FutureAnswer:
            if model.has_failed:
                model.has_failed = False
                model.learner.clear()
                raise LearnerError(
                    "a forward_backward before this optim_step failed, so the gradient is not whole: no weight was "
                    "changed, and the gradient was dropped"
                )
            settings = Adam(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay)
            norm = model.learner.update(settings, max_norm=max(0.0, adam.grad_clip_norm))
            return plain_answer({"metrics": {"grad_norm:mean": norm}, "type": "optim_step"})

        return self._submit(model, seq_id, digest, update)

    def save(self, id: str, seq_id: int | None, to: SaveTo, owner: str, digest: bytes) -> str:
        model = self.get(id, owner)
        with_optimizer = to.at.kind == "weights"

        def save() -> FutureAnswer:
            fill: Callable[[Path], None] = partial(model.learner.save, optimizer=with_optimizer)
            self.store.save(to.at, owner, model.learner.num_updates, to.notes, fill, over=to.overwrites)
            kinds = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
            return plain_answer({"path": to.at.uri, "type": kinds.get(to.at.kind, "save_weights_external")})

        return self._submit(model, seq_id, digest, save)

    def load(self, id: str, seq_id: int | None, at: Place, optimizer: bool, owner: str, digest: bytes) -> str:
        model = self.get(id, owner)

        def load() -> FutureAnswer:
            path = self.store.find(at, owner)
            _load(model.learner, path, optimizer)
            model.has_failed = False
            return plain_answer({"path": at.uri, "model_id": id, "type": "load_weights"})

        return self._submit(model, seq_id, digest, load)

    def sample_from(self, id: str, seq_id: int | None, sampler: str, owner: str, digest: bytes) -> str:
        """Returns the id of a request that lets `sampler` sample from a copy of the weights, without saving them."""
        model = self.get(id, owner)

        async def work() -> FutureAnswer:
            await self.samplers.add_snapshot(sampler, owner, model.run.id, model.learner)
            return plain_answer({"path": None, "sampling_session_id": sampler, "type": "save_weights_for_sampler"})

        return model.turns.submit(seq_id, owner, digest, work).id

    def refuse(self, id: object, seq_id: object, error: ChatError, owner: str, digest: bytes, *, is_pass: bool) -> str:
        """Returns the id of a request that fails in its turn, so later requests do not wait for its number.

        `is_pass`: the gradient is now incomplete. Raises the error directly if the request lacks a valid model or
        number.
        """
        model = self.models.get(id) if isinstance(id, str) else None
        if model is None or model.run.owner != owner or not isinstance(seq_id, int) or isinstance(seq_id, bool):
            raise error

        async def work() -> FutureAnswer:
            model.has_failed = model.has_failed or is_pass
            raise error

        return model.turns.submit(seq_id, owner, digest, work).id

    def _submit(self, model: Model, seq_id: int | None, digest: bytes, work: Callable[[], FutureAnswer]) -> str:
        return model.turns.submit(seq_id, model.run.owner, digest, partial(threads.compute, work)).id


def _load(learner: ClientLearner, path: Path, optimizer: bool) -> None:
    if optimizer and not (path / "optimizer.safetensors").is_file():
        raise invalid("these weights were saved for sampling, without an optimizer; load them without it")
    learner.load(path, optimizer=optimizer)


def describe(store: Store, at: Place, owner: str) -> dict[str, Any]:
    """Returns weights_info: the facts a client needs for loading a checkpoint."""
    found, run = store.find(at, owner), store.run(at.run)
    if not run.rank:
        return {"base_model": run.base_model, "is_lora": False, "lora_rank": None}
    lora = lora_of(found)
    parts = parts_of(lora)
    return {
        "base_model": run.base_model,
        "is_lora": True,
        "lora_rank": lora.rank,
        "train_unembed": False,
        "train_mlp": parts.mlp,
        "train_attn": parts.attention,
    }
