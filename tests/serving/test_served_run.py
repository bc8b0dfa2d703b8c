"""ServedRun: who answers while served.json changes, and that no change fails a call or leaves an engine open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import Canary, Served, write_served
from art_cli.runtime.errors import CheckpointError, EngineError
from art_cli.serving.gateway import served_run
from art_cli.serving.gateway.gateway_service import ClientBackend
from art_cli.serving.gateway.served_run import ServedRun
from art_cli.serving.served_model import Source
from art_cli.serving.served_policies import _wanted as wanted_step
from tests.support.processes.waiting import until
from tests.support.servers.served import ScriptedEngine, ScriptedLoader, scripted_source
from tests.support.servers.serving import USER

CANARY = Canary("new", "digest of new", 0.5, "salt")
STEPS = {"old": 1, "new": 2}


class Engine(ScriptedEngine):
    """Answers with its step."""

    def __init__(self, _: object, name: str, step: int) -> None:
        super().__init__(lambda request: str(step), name, step)
        self.fails = asyncio.Event()

    async def watch(self) -> NoReturn:
        await self.fails.wait()
        raise EngineError("died")


class Run(ServedRun):
    """Its checkpoints need no files. Those in `missing` cannot be loaded."""

    missing: frozenset[str] = frozenset()

    def _source(self, checkpoint: str | None) -> Source:
        name = checkpoint or "old"
        if name in self.missing:
            raise CheckpointError(f"{name}: damaged")
        return scripted_source(step=STEPS[name])._replace(base=name)

    async def steps(self) -> set[int]:
        """The steps that answer forty conversations."""
        return {await self.step_of(f"conversation {number}") for number in range(40)}

    async def step_of(self, conversation: str | None) -> int:
        request = Request(model="m", messages=[USER], sampling=Sampling(), group=conversation)
        (choice,) = (await self.reply(request)).choices
        pieces = [chunk.choice.message or {} async for chunk in self.stream(request)]
        assert choice.message is not None
        assert "".join(piece.get("content") or "" for piece in pieces) == choice.message["content"]
        return int(choice.message["content"])


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "POLL_S", 0.01)
    monkeypatch.setattr(served_run, "RETRY_S", 0.05)


@asynccontextmanager
async def following(root: Path, canary: Canary | None = CANARY, missing: str = "") -> AsyncIterator[tuple[Run, Any]]:
    write_served(root, Served("old", "", canary=canary))
    loader = ScriptedLoader(make=Engine)
    run = Run(RunDir(root), loader, name="mine")  # type: ignore[arg-type]
    run.missing = frozenset([missing])
    await run.start()
    watching = asyncio.create_task(run.watch())
    try:
        yield run, loader
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
        await run.close()
        assert all(engine.is_closed for engine in loader.engines)


async def test_a_promoted_candidate_answers_all_without_being_loaded_again(tmp_path: Path) -> None:
    async with following(tmp_path) as (run, loader):
        assert await run.steps() == {1, 2}
        before = [await run.step_of(f"{number}") for number in range(20)]
        assert before == [1 + CANARY.answers(f"{number}") for number in range(20)], "the same after any restart"
        assert await run.step_of(None) == 1, "calls without a conversation are not on trial"
        write_served(tmp_path, Served("new", CANARY.policy, ["old"]))
        await until(lambda: loader.engines[0].is_closed)
        assert await run.steps() == {2} and len(loader.engines) == 2
        write_served(tmp_path, Served("old", ""))  # art improve --rollback
        await until(lambda: loader.engines[1].is_closed)
        assert await run.steps() == {1}


async def test_a_checkpoint_that_cannot_be_loaded_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path, missing="new") as (run, _):
        assert await run.steps() == {1}
        run.missing = frozenset()
        await until(lambda: run._candidate is not None)
        assert await run.steps() == {1, 2}
        run.missing = frozenset(["old"])
        write_served(tmp_path, Served("new", "", ["old"]))
        await until(lambda: run._served is not None and run._served.checkpoint == "new")
        write_served(tmp_path, Served("old", ""))
        await until(lambda: "old: damaged" in caplog.text)
        await asyncio.sleep(0.15)
        assert await run.steps() == {2} and caplog.text.count("old: damaged") == 1
        run.missing = frozenset()
        await until(lambda: run.endpoint.step == 1)
        assert await run.steps() == {1}


async def test_a_candidate_whose_engine_fails_is_started_again_and_the_promoted_one_ends_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_run, "RETRY_S", 1.0)
    async with following(tmp_path) as (run, loader):
        loader.engines[1].fails.set()
        await until(lambda: run._candidate is None or run._candidate[1].watching.done())
        assert await run.steps() == {1}
        await until(lambda: loader.engines[1].is_closed)
        await until(lambda: run._candidate is not None)
        assert await run.steps() == {1, 2} and len(loader.engines) == 3
        loader.engines[0].fails.set()
        with pytest.raises(EngineError, match="died"):
            await asyncio.wait_for(run.watch(), 5)


def test_art_serve_follows_what_art_improve_promotes(tmp_path: Path) -> None:
    """Not the newest checkpoint of the run itself, unless --last asks for it."""
    run, promoted = RunDir(tmp_path), "nights/night_0001/run/checkpoints/step_0002"
    for step, path in ((3, run.checkpoint_path(3)), (2, tmp_path / promoted)):
        with new_checkpoint(path, Manifest(step=step, base="nothing", config_hash="")):
            pass
    write_served(tmp_path, Served(promoted, ""))
    found = [wanted_step(run, which) for which in ("offered", "newest")]  # type: ignore[arg-type]
    assert [step for step, _ in filter(None, found)] == [2, 3]


async def test_clients_do_not_see_the_policy_also_of_calls_that_are_not_recorded(tmp_path: Path) -> None:
    nothing: Any = None
    request = Request(model="m", messages=[USER], sampling=Sampling(), is_recorded=False)
    async with following(tmp_path) as (run, _):
        run._promoted.policy.proven.add((await run.reply(request)).step, "9f3c")
        for is_blind, seen in ((False, "9f3c"), (True, "")):
            backend = ClientBackend("key 1", run, nothing, nothing, nothing, nothing, is_blind)
            assert (await backend.reply(request)).policy == seen
            assert {chunk.policy async for chunk in backend.stream(request)} == {seen}
