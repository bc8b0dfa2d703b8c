"""Penalties, biases and barred ends of the embedded engine, compared with transformers and the protocols' formulas."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.embedded.token_sampling import Reshaping
from art_cli.models.weights import Weights
from tests.engines.test_embedded_engine import chat, full_logprobs, running, text_request
from tests.support.models.tiny import tiny_weights

SETTINGS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "presence_penalty": -1.0},
    {"logit_bias": ((5, 100.0), (65, -100.0))},
    {"logit_bias": ((66, 3.0),), "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
]


def reference(row: torch.Tensor, prompt: list[int], sampled: list[int], ends: list[int], s: Sampling) -> torch.Tensor:
    """[V] logits after bias, barred ends and penalties, each by its definition, token by token."""
    row = row.clone()
    for token, bias in s.logit_bias:
        row[token] += bias
    ids = torch.tensor([prompt + sampled])
    if s.min_tokens:
        row = MinNewTokensLengthLogitsProcessor(len(prompt), s.min_tokens, ends)(ids, row[None])[0]  # type: ignore[arg-type]
    row = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, row[None])[0]  # type: ignore[arg-type]
    for token in set(sampled):
        row[token] -= s.frequency_penalty * sampled.count(token) + s.presence_penalty
    return row


def greedy(weights: Weights, prompt: list[int], settings: Sampling, ends: list[int]) -> list[int]:
    """The likeliest token after another, each by a full forward."""
    sampled: list[int] = []
    while len(sampled) < (settings.max_tokens or 0) and not (set(sampled[-1:]) & set(ends)):
        with torch.no_grad():
            row = weights.model(torch.tensor([prompt + sampled])).logits[0, -1].float()
        sampled.append(int(reference(row, prompt, sampled, ends, settings).argmax()))
    return sampled


@pytest.mark.parametrize("settings", SETTINGS + [{"min_tokens": 9}, {"min_tokens": 3}], ids=str)
def test_logits_are_changed_as_defined(settings: dict[str, Any]) -> None:
    prompt, sampled, ends = [3, 3, 9, 70], [5, 66, 66, 9, 65], [80, 81]
    row = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 3
    found = row.clone()
    Reshaping(Sampling(**settings), np.array(prompt), np.array(ends)).apply(found, np.array(sampled))
    assert torch.allclose(found, reference(row, prompt, sampled, ends, Sampling(**settings)), atol=1e-5)


async def test_each_request_of_a_batch_has_its_own_penalties() -> None:
    """Seven concurrent greedy requests in three slots give the same replies as alone."""
    weights = tiny_weights()
    prompt, max_tokens = list(b"a banana and a bandana"), 24
    async with running(weights, max_batch=3) as engine:
        ends = engine._stop_ids
        requests = [text_request(prompt, temperature=0.0, max_tokens=max_tokens, **settings) for settings in SETTINGS]
        replies = await asyncio.gather(*map(engine.reply, requests))
    for request, reply in zip(requests, replies, strict=True):
        sampled = reply.choices[0].token_ids
        assert sampled == greedy(weights, prompt, request.sampling, ends)
        expected = full_logprobs(weights, prompt, sampled)
        assert reply.choices[0].raw_logprobs == pytest.approx(expected, abs=1e-5)
    assert len({tuple(reply.choices[0].token_ids) for reply in replies}) > 3


async def test_reported_logprobs_are_those_of_the_changed_logits() -> None:
    """`logprobs` under softmax(changed logits / temperature), `raw_logprobs` under softmax(logits)."""
    weights = tiny_weights()
    settings = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "temperature": 0.7}
    async with running(weights) as engine:
        request = chat("hello hello", seed=1, **settings)
        reply = await engine.reply(request)
    prompt, sampled = reply.prompt_ids, reply.choices[0].token_ids
    expected = []
    for place, token in enumerate(sampled):
        with torch.no_grad():
            row = weights.model(torch.tensor([prompt + sampled[:place]])).logits[0, -1].float()
        row = reference(row, prompt, sampled[:place], [], request.sampling)
        expected.append(float((row / 0.7).log_softmax(-1)[token]))
    assert reply.choices[0].logprobs == pytest.approx(expected, abs=1e-4)
    assert reply.choices[0].raw_logprobs == pytest.approx(full_logprobs(weights, prompt, sampled), abs=1e-5)


async def test_the_end_comes_as_early_as_it_may() -> None:
    """A bias of 100 forces every stop token: immediately, after `min_tokens`, or never."""
    async with running() as engine:
        ends = tuple((id, 100.0) for id in engine._stop_ids)

        async def length(**settings: Any) -> tuple[int, str]:
            reply = await engine.reply(text_request(list(b"abc"), max_tokens=12, seed=1, logit_bias=ends, **settings))
            return len(reply.choices[0].token_ids), reply.choices[0].finish_reason

        assert await length() == (1, "stop")
        assert await length(min_tokens=5) == (6, "stop")
        assert await length(min_tokens=12) == (12, "length")
        assert await length(ignore_eos=True) == (12, "length")
        assert await length(ignore_eos=True, stop_ids=(ends[0][0],)) == (1, "stop")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_stop_string_counts_before_min_tokens(is_stream: bool) -> None:
    """A bias of 100 forces the reply `bbbb...`: it stops at letter six, not at letter one."""
    request = text_request([1, 2], max_tokens=12, min_tokens=5, stop=("b",), logit_bias=((65, 100.0),))
    async with running() as engine:
        if is_stream:
            choices = [chunk.choice async for chunk in engine.stream(request)]
        else:
            choices = (await engine.reply(request)).choices
    assert "".join(choice.text for choice in choices) == "bbbbb"
    assert sum(len(choice.token_ids) for choice in choices) == 6
    assert (choices[-1].finish_reason, choices[-1].stop_string) == ("stop", "b")


@pytest.mark.parametrize("settings", [{"min_tokens": 2}, {"ignore_eos": True}], ids=str)
async def test_an_end_that_a_format_decides_is_not_barred(settings: dict[str, Any]) -> None:
    """Returns 400, because no token could follow the complete answer; the engine keeps working."""
    async with running() as engine:
        request = Request(
            model="policy",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_object"},
            sampling=Sampling(max_tokens=9, **settings),
        )
        with pytest.raises(ChatError, match="min_tokens, ignore_eos") as caught:
            await engine.reply(request)
        assert caught.value.status == 400
        with pytest.raises(ChatError, match="logit_bias: the model has no token 100000"):
            await engine.reply(chat(logit_bias=((100_000, 1.0),)))
        assert (await engine.reply(chat(max_tokens=2))).choices[0].token_ids
