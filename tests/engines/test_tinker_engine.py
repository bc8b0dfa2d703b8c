"""The engine of a server of the Tinker protocol: the embedded engine's replies, by the real SDK on a real server."""

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig, TinkerEngineConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.models.policy_spec import spec_of
from art_cli.runtime.errors import CheckpointError, EngineError
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.tinker_engine import TinkerEngine
from tests.support.servers.backend_server import serving, tiny_base

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[None]:
    """Collects the sockets that the SDK leaves open while this module's filter of warnings holds."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(base, tmp_path_factory.mktemp("backend")) as address:
        yield address


@pytest.fixture
async def engine(base: Base, address: str) -> AsyncIterator[TinkerEngine]:
    config = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=30)
    engine = TinkerEngine(config, spec_of(base.weights), name="p")
    await engine.start()
    yield engine
    await engine.close()


def asked(**changed: Any) -> Request:
    sampling = Sampling(max_tokens=12, seed=3, n=2)
    request = Request(model="p", messages=[{"role": "user", "content": "say letters"}], sampling=sampling)
    return msgspec.structs.replace(request, **changed)


@pytest.mark.slow
async def test_a_reply_is_the_embedded_engines(base: Base, engine: TinkerEngine) -> None:
    """The same tokens, texts, messages and prompt for the same seed; logprobs within float32's rounding."""
    local = EmbeddedEngine(base.policy(None), name="p", config=EmbeddedEngineConfig())
    await local.start()
    try:
        for request in (
            asked(),
            asked(sampling=Sampling(max_tokens=30, temperature=0.0)),
            asked(sampling=Sampling(max_tokens=40, seed=5, stop=("e", "a"))),
            asked(tools=TOOLS),
            asked(messages=None, prompt="abc"),
            asked(wants_logprobs=True, sampling=Sampling(max_tokens=3, seed=1)),
        ):
            theirs, ours = await engine.reply(request), await local.reply(request)
            assert theirs.prompt_ids == ours.prompt_ids and theirs.sampling == ours.sampling
            for found, expected in zip(theirs.choices, ours.choices, strict=True):
                for name in ("token_ids", "text", "message", "tokens", "finish_reason", "stop_string"):
                    assert getattr(found, name) == getattr(expected, name), name
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
                assert found.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=1e-5)
        ids = list(range(30, 50))
        assert await engine.score(ids) == pytest.approx(await local.score(ids), abs=1e-5)
    finally:
        await local.close()


async def test_logprobs_of_another_temperature_are_not_taken_for_the_policys(engine: TinkerEngine) -> None:
    [choice] = (await engine.reply(asked(sampling=Sampling(max_tokens=4, temperature=0.5)))).choices
    assert choice.is_masked


async def test_a_stream_has_the_tokens_of_the_reply(engine: TinkerEngine) -> None:
    chunks = [chunk async for chunk in engine.stream(asked())]
    whole = await engine.reply(asked())
    assert [chunk.choice.token_ids for chunk in chunks] == [choice.token_ids for choice in whole.choices]
    assert chunks[0].prompt_ids == whole.prompt_ids and all(chunk.is_last for chunk in chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"response_format": {"type": "json_object"}}, "cannot enforce a format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "cannot enforce a format"),
        ({"wants_logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"sampling": Sampling(min_tokens=2, ignore_eos=True)}, "min_tokens, ignore_eos"),
        ({"model": "other"}, "does not exist"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "context"),
    ],
)
async def test_what_the_protocol_cannot_do_is_refused_by_name(
    changed: dict[str, Any], says: str, engine: TinkerEngine
) -> None:
    with pytest.raises(ChatError, match=says) as caught:
        await engine.reply(asked(**changed))
    assert caught.value.status < 500


async def test_a_checkpoint_whose_weights_are_here_is_refused(engine: TinkerEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its weights are here and not on a server"):
        await engine.load(tmp_path, 1)


@pytest.mark.slow
async def test_a_server_that_went_away_ends_the_run_and_not_only_the_call(base: Base, tmp_path: Path) -> None:
    with serving(base, tmp_path / "backend") as address:
        config = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=2)
        engine = TinkerEngine(config, spec_of(base.weights), name="p")
        await engine.start()
        await engine.reply(asked())
    with pytest.raises(ChatError) as caught:
        await engine.reply(asked())
    assert caught.value.status == 502
    with pytest.raises(EngineError, match="was not there within 2 s|connection was lost"):
        await engine.watch()
    await engine.close()
