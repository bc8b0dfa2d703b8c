"""The logprobs that clients of `art serve` see, on every path, compared with transformers on the same files."""

from typing import Any

import openai
import pytest
import torch

from art_cli.chat.client import HttpBackend
from art_cli.chat.requests import Sampling
from art_cli.rollouts.gateway import Gateway
from art_cli.run_dir import RunDir
from art_cli.serving.source import find_source
from tests.support.scripted import Engine
from tests.support.serving import USER, client, own_logprobs, serving

IDS = {"return_token_ids": True}
CUTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "extra_body": {"top_k": 2}},
    {"temperature": 0.4, "top_p": 0.9, "extra_body": {"top_k": 5}},
]


async def chat_entries(ai: openai.AsyncOpenAI, **cut: Any) -> tuple[list[int], list[int], list[tuple[float, float]]]:
    """The prompt, the sampled tokens, and the logprobs of each and of the likeliest in its place."""
    extra = IDS | cut.pop("extra_body", {})
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **cut}
    reply = await ai.chat.completions.create(model="mine", messages=[USER], extra_body=extra, **asked)
    (choice,) = reply.choices
    assert choice.model_extra and reply.model_extra and choice.logprobs and choice.logprobs.content
    pairs = [(each.logprob, each.top_logprobs[0].logprob) for each in choice.logprobs.content]
    return reply.model_extra["prompt_token_ids"], choice.model_extra["token_ids"], pairs


async def others(ai: openai.AsyncOpenAI, prompt: list[int], **cut: Any) -> dict[str, list[float]]:
    """The sampled tokens' logprobs of the same answer, asked on every other way."""
    found: dict[str, list[float]] = {}
    same: dict[str, Any] = {"model": "mine", "seed": 3, "max_tokens": 6, **cut}
    stream = await ai.chat.completions.create(messages=[USER], stream=True, logprobs=True, **same)
    chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    found["chat streamed"] = [each.logprob for c in chunks if c.logprobs for each in c.logprobs.content or ()]
    text = await ai.completions.create(prompt=prompt, logprobs=2, **same)
    found["text"] = list(text.choices[0].logprobs.token_logprobs)  # type: ignore[union-attr, arg-type]
    pieces = await ai.completions.create(prompt=prompt, logprobs=2, stream=True, **same)
    parts = [chunk.choices[0].logprobs async for chunk in pieces if chunk.choices]
    found["text streamed"] = [each for part in parts if part for each in part.token_logprobs or ()]  # type: ignore[misc]
    return found


@pytest.mark.parametrize("cut", CUTS, ids=["greedy", "top_p", "top_k", "all"])
async def test_the_sampled_tokens_logprob_is_the_models_own(run: RunDir, cut: dict[str, Any]) -> None:
    """log_softmax(logits) to 1e-4 on every path, and the same distribution's as `top_logprobs`, whatever was cut."""
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        prompt, sampled, pairs = await chat_entries(ai, **cut)
        found = await others(ai, prompt, **cut)
        if cut == {"temperature": 0.0}:
            include: Any = ["message.output_text.logprobs"]
            response = await ai.responses.create(
                model="mine", input="hi", max_output_tokens=16, include=include, temperature=0
            )
            told: Any = response.output[0]
            found["responses"] = [each.logprob for each in told.content[0].logprobs][:6]
    rows = own_logprobs(run, 2, prompt + sampled)[len(prompt) - 1 :]
    expected = rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
    assert [own for own, _ in pairs] == pytest.approx(expected, abs=1e-4)
    assert [top for _, top in pairs] == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
    for path, logprobs in found.items():
        assert logprobs == pytest.approx(expected, abs=1e-4), path


async def test_processed_logprobs_are_reported_where_the_server_is_set_to(run: RunDir) -> None:
    """Both at the temperature sampled at, as vLLM's mode of that name has it."""
    async with serving(find_source(str(run.root)), is_processed=True) as (_, root), client(root) as ai:
        prompt, sampled, pairs = await chat_entries(ai, temperature=0.4)
    rows = own_logprobs(run, 2, prompt + sampled, temperature=0.4)[len(prompt) - 1 :]
    expected = rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
    assert [own for own, _ in pairs] == pytest.approx(expected, abs=1e-4)
    assert [top for _, top in pairs] == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


async def test_a_gateway_before_art_serve_records_what_was_sampled_from(run: RunDir) -> None:
    """The turn has both logprobs, as with an engine in the same process; the client sees the model's own."""
    async with serving(find_source(str(run.root))) as (_, root):
        backend = HttpBackend(f"{root}/v1", "none", "mine")
        gateway = Gateway(Engine(backend, "mine"), defaults=Sampling(), seed=0, max_turns=9)  # type: ignore[arg-type]
        async with gateway.serve() as url:
            key = gateway.open("one")
            async with client(url.removesuffix("/v1"), key) as ai:
                prompt, sampled, pairs = await chat_entries(ai, temperature=0.4)
            (turn,) = gateway.close(key).turns
        await backend.close()
    places = torch.tensor(sampled)[:, None]
    rows, scaled = (own_logprobs(run, 2, prompt + sampled, t)[len(prompt) - 1 :] for t in (1.0, 0.4))
    assert turn.sampled_ids == sampled
    assert turn.logprobs == pytest.approx(scaled.gather(1, places)[:, 0].tolist(), abs=1e-4)
    assert turn.raw_logprobs == pytest.approx(rows.gather(1, places)[:, 0].tolist(), abs=1e-4)
    assert [own for own, _ in pairs] == pytest.approx(turn.raw_logprobs, abs=1e-6)
    assert [top for _, top in pairs] == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
