"""The openai engine against a real server on loopback: another engine of ours behind the chat application."""

from pathlib import Path

import pytest

from art_cli.chat.chat_app import build_app
from art_cli.chat.http_server import serve
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig, OpenAIEngineConfig
from art_cli.engines import make_engine
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.engines.openai_endpoint import OpenAIEngine
from art_cli.runtime.errors import EngineError
from tests.support.models.tiny import tiny_weights
from tests.support.servers.ports import free_port


def settings(url: str, model: str = "policy", key: str = "TEST_KEY") -> OpenAIEngineConfig:
    return OpenAIEngineConfig(name="openai", url=url, model=model, api_key_env=key)


async def test_it_answers_what_the_endpoint_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logprobs come through the wire as the serving engine sampled them."""
    monkeypatch.setenv("TEST_KEY", "sk-secret")
    behind = EmbeddedEngine(tiny_weights(), name="policy", config=EmbeddedEngineConfig())
    await behind.start()
    request = Request(
        model="policy",
        messages=[{"role": "user", "content": "hello"}],
        sampling=Sampling(max_tokens=8, seed=3),
        user_set=frozenset({"max_tokens", "seed"}),
        wants_logprobs=True,
        wants_token_ids=True,
    )
    try:
        async with serve(build_app({"sk-secret": behind}.__getitem__)) as root:
            engine = make_engine(settings(f"{root}/v1"), None, name="unused", logs=tmp_path)
            await engine.start()
            far, near = await engine.backend.reply(request), await behind.reply(request)
            await engine.close()
    finally:
        await behind.close()
    assert isinstance(engine, OpenAIEngine)
    assert far.prompt_ids == near.prompt_ids
    assert far.choices[0].token_ids == near.choices[0].token_ids
    assert far.choices[0].logprobs == pytest.approx(near.choices[0].logprobs, abs=1e-5)
    assert "sk-secret" not in repr(engine.endpoint)


async def test_it_cannot_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "x")
    engine = OpenAIEngine(settings("https://host.invalid/v1"))
    with pytest.raises(EngineError, match="cannot be trained"):
        await engine.load(tmp_path, 1)
    with pytest.raises(EngineError, match="cannot score"):
        await engine.score([1, 2])
    await engine.close()


def test_a_missing_key_is_named_unless_the_endpoint_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(EngineError, match="TEST_KEY"):
        OpenAIEngine(settings("https://host.invalid/v1"))
    OpenAIEngine(settings("http://127.0.0.1:1/v1"))


async def test_a_port_where_nothing_listens_is_found_at_the_start() -> None:
    port = free_port()
    engine = OpenAIEngine(settings(f"http://127.0.0.1:{port}/v1"))
    with pytest.raises(EngineError, match=str(port)):
        await engine.start()
    await engine.close()
