"""The embedded engine as its users see it: requests in, replies out, compared with transformers on the same weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tiny import tiny_weights

from art_cli.chat.errors import ChatError
from art_cli.chat.replies import ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.engines.embedded.engine import EmbeddedEngine
from art_cli.errors import EngineError
from art_cli.model import Weights

WORDS = ["red", "one two three", "a longer line that says nothing of note", "x", "Straße — 日本", "seven"]


@asynccontextmanager
async def running(weights: Weights | None = None, **config: int) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(weights or tiny_weights(), name="policy", config=EmbeddedEngineConfig(**config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def chat(text: str = "hello", **sampling: Any) -> Request:
    extra = {key: sampling.pop(key) for key in ("tools", "tool_choice", "model", "wants_logprobs", "top_logprobs")
             if key in sampling}  # fmt: skip
    sampling = {"max_tokens": 24, **sampling}
    return Request(
        model=extra.pop("model", "policy"),
        messages=[{"role": "user", "content": text}],
        sampling=Sampling(**sampling),
        user_set=frozenset(sampling),
        **extra,
    )


def full_logprobs(weights: Weights, prompt: list[int], sampled: list[int]) -> list[float]:
    """Logprobs of the sampled tokens by one plain forward of the whole sequence."""
    with torch.no_grad():
        logits = weights.model(torch.tensor([prompt + sampled])).logits[0].float()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


async def test_greedy_tokens_are_those_of_transformers_generate() -> None:
    weights = tiny_weights()
    async with running(weights) as engine:
        replies = await asyncio.gather(*(engine.reply(chat(word, temperature=0.0)) for word in WORDS))
    for reply in replies:
        prompt = torch.tensor([reply.prompt_ids])
        expected = weights.model.generate(prompt, max_new_tokens=24, do_sample=False)[0, len(reply.prompt_ids) :]
        assert reply.choices[0].token_ids == expected.tolist()


async def test_logprobs_are_those_of_a_full_forward() -> None:
    """At temperature 1 without cuts both logprobs are log_softmax(logits) at the sampled tokens, to 1e-5."""
    weights = tiny_weights()
    async with running(weights) as engine:
        replies = await asyncio.gather(*(engine.reply(chat(word, n=2)) for word in WORDS))
    for reply in replies:
        for choice in reply.choices:
            expected = full_logprobs(weights, reply.prompt_ids, choice.token_ids)
            assert choice.raw_logprobs == pytest.approx(expected, abs=1e-5)
            assert choice.logprobs == pytest.approx(expected, abs=1e-5)


async def test_a_seeded_request_is_the_same_alone_and_in_company() -> None:
    async with running() as engine:
        alone = await engine.reply(chat("hello", seed=7, temperature=0.8))
        company = [engine.reply(chat(word, seed=index)) for index, word in enumerate(WORDS * 3)]
        shared, *_ = await asyncio.gather(engine.reply(chat("hello", seed=7, temperature=0.8)), *company)
        other = await engine.reply(chat("hello", seed=8, temperature=0.8))
    assert shared.choices[0].token_ids == alone.choices[0].token_ids
    assert other.choices[0].token_ids != alone.choices[0].token_ids


@pytest.mark.parametrize("stop", [(), ("a", "\x16P")])
async def test_a_stream_put_together_is_the_plain_reply(stop: tuple[str, ...]) -> None:
    async with running() as engine:
        for seed in range(6):
            request = chat("hello", seed=seed, max_tokens=40, stop=stop, wants_logprobs=True, top_logprobs=2)
            plain = await engine.reply(request)
            builder = ReplyBuilder(request)
            async for chunk in engine.stream(request):
                builder.add(chunk)
            streamed = builder.reply()
            assert streamed.prompt_ids == plain.prompt_ids
            one, other = streamed.choices[0], plain.choices[0]
            for name in ("text", "message", "token_ids", "tokens", "finish_reason"):
                assert getattr(one, name) == getattr(other, name)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.top_logprobs is not None and len(one.top_logprobs) == len(one.token_ids)


async def test_what_does_not_fit_the_context_is_refused_in_openai_words() -> None:
    async with running() as engine:
        for request in (chat("x" * 2000), chat("x", max_tokens=1020)):
            with pytest.raises(ChatError) as refusal:
                await engine.reply(request)
            assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
        clipped = await engine.reply(
            Request(model="policy", prompt=[65] * 1000, sampling=Sampling(max_tokens=500, temperature=0.0))
        )
    assert len(clipped.choices[0].token_ids) <= 24  # 1024 - 1000: what is left, since the client asked for nothing


async def test_an_unknown_model_is_a_404() -> None:
    async with running() as engine:
        with pytest.raises(ChatError) as refusal:
            await engine.reply(chat(model="gpt-5"))
    assert (refusal.value.status, refusal.value.code) == (404, "model_not_found")


async def test_a_closed_engine_answers_with_an_error() -> None:
    async with running() as engine:
        pass
    with pytest.raises(ChatError, match="closed"):
        await engine.reply(chat())
    with pytest.raises(EngineError, match="closed"):
        await engine.score([1, 2])
