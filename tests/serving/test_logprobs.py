"""The logprobs that clients of `art serve` see, on every path, compared with transformers on the same files."""

from typing import Any

import openai
import pytest
import torch
import transformers

from art_cli.chat.client import HttpBackend
from art_cli.chat.requests import Sampling
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.run_dir import RunDir
from art_cli.serving.served_model import find_source
from tests.support.servers.serving import USER, client, own_logprobs, serving
from tests.support.standins.scripted import Engine

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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- prompts that plain completions repeat ----------------------------------------------------------------------------


TEXT = "Straße — 日本, one two"


def ids_of(run: RunDir, text: str) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(run.base)(text)["input_ids"])


def are_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, their floats to 1e-4, because batches round otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-4
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


def check_echo(run: RunDir, choice: Any, ids: list[int]) -> None:
    """Every token of prompt and reply has its logprob under the files' model, its place, and the likeliest."""
    told = choice.logprobs
    tokens = ids + choice.model_extra["token_ids"]
    rows = own_logprobs(run, 2, tokens)
    expected = rows.gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert told.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    for top, token, logprob, row in zip(told.top_logprobs[1:], told.tokens[1:], expected, rows, strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4) and len(top) <= 3
        assert top[token] >= logprob - 1e-4
        if logprob == float(row.max()):
            assert top[token] == max(top.values())  # exactly, because lm-evaluation-harness looks for it so
    assert len(told.tokens) == len(told.text_offset) == len(tokens)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert "\ufffd" in token or choice.text[offset : offset + len(token)] == token


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "ids"])
async def test_a_repeated_prompt_has_its_logprobs(run: RunDir, is_text: bool, max_tokens: int) -> None:
    """Whole and streamed, as log-likelihood tasks of evaluation harnesses ask for it."""
    ids = ids_of(run, TEXT)
    asked: dict[str, Any] = {"prompt": TEXT if is_text else ids, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        whole = await ai.completions.create(model="mine", seed=2, extra_body=IDS, **asked)
        stream = await ai.completions.create(model="mine", seed=2, stream=True, **asked)
        pieces = [chunk.choices[0] async for chunk in stream]
        silent = await ai.completions.create(model="mine", seed=2, **{**asked, "logprobs": None})
    (choice,) = whole.choices
    check_echo(run, choice, ids)
    assert choice.text.startswith(TEXT) and choice.model_extra and choice.model_extra["prompt_token_ids"] == ids
    assert len(choice.model_extra["token_ids"]) <= max_tokens and whole.usage
    assert (whole.usage.prompt_tokens, silent.choices[0].text) == (len(ids), choice.text)
    assert "".join(piece.text for piece in pieces) == choice.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        told = [each for piece in pieces if piece.logprobs for each in getattr(piece.logprobs, name) or ()]
        assert are_same(told, getattr(choice.logprobs, name)), name
    assert max_tokens or choice.finish_reason == "length"


async def test_each_prompt_of_a_list_is_answered_as_if_it_came_alone(run: RunDir) -> None:
    """Choices of prompt i have the indices i * n to i * n + n - 1, whole and streamed; usage counts all prompts."""
    prompts = ["abc", "one two", TEXT]
    asked: dict[str, Any] = {"seed": 4, "max_tokens": 5, "n": 2, "echo": True, "logprobs": 2, "extra_body": IDS}
    async with serving(find_source(str(run.root))) as (service, root), client(root) as ai:
        together = await ai.completions.create(model="mine", prompt=prompts, **asked)
        alone = [await ai.completions.create(model="mine", prompt=prompt, **asked) for prompt in prompts]
        ids = await ai.completions.create(model="mine", prompt=[ids_of(run, each) for each in prompts], **asked)
        options: Any = {"include_usage": True}
        stream = await ai.completions.create(model="mine", prompt=prompts, stream=True, stream_options=options, **asked)
        chunks = [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError, match="context"):
            await ai.completions.create(model="mine", prompt=["a", "b" * 20_000], max_tokens=4)
        with pytest.raises(openai.APIError, match="context"):  # an event, if another prompt's answer has begun
            async for _ in await ai.completions.create(
                model="mine", prompt=["a", "b" * 20_000], max_tokens=4, stream=True
            ):
                pass
        assert service.admission.num_in_flight == service.admission.num_answering == 0
    singles = [choice for reply in alone for choice in reply.choices]
    assert [choice.index for choice in together.choices] == list(range(6))
    for found in (together, ids):
        for choice, single in zip(found.choices, singles, strict=True):
            assert choice.text == single.text
            assert choice.logprobs and single.logprobs and choice.model_extra and single.model_extra
            assert choice.model_extra["token_ids"] == single.model_extra["token_ids"]
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(single.logprobs.token_logprobs[1:], abs=1e-4)
    totals = [sum(getattr(reply.usage, name) for reply in alone) for name in ("prompt_tokens", "completion_tokens")]
    for usage in (together.usage, chunks[-1].usage):
        assert usage and [usage.prompt_tokens, usage.completion_tokens] == totals
    assert len({chunk.id for chunk in chunks}) == 1
    for index, single in enumerate(singles):
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(piece.text for piece in pieces) == single.text


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("wants_logprobs", [True, False])
async def test_a_repeated_prompt_comes_through_a_gateway(run: RunDir, wants_logprobs: bool, max_tokens: int) -> None:
    """HttpBackend takes the prompt's part out of the lists, so that the gateway records what was sampled alone."""
    ids = ids_of(run, TEXT)
    asked: dict[str, Any] = {"prompt": ids, "echo": True, "max_tokens": max_tokens, "temperature": 0}
    if wants_logprobs:
        asked["logprobs"] = 2
    async with serving(find_source(str(run.root))) as (_, root):
        backend = HttpBackend(f"{root}/v1", "none", "mine")
        gateway = Gateway(Engine(backend, "mine"), defaults=Sampling(), seed=0, max_turns=9)  # type: ignore[arg-type]
        async with gateway.serve() as url, client(root) as direct:
            key = gateway.open("one")
            async with client(url.removesuffix("/v1"), key) as ai:
                found = (await ai.completions.create(model="mine", extra_body=IDS, **asked)).choices[0]
                stream = await ai.completions.create(model="mine", stream=True, **asked)
                text = "".join([chunk.choices[0].text async for chunk in stream])
            expected = (await direct.completions.create(model="mine", extra_body=IDS, **asked)).choices[0]
            turns = gateway.close(key).turns
        await backend.close()
    assert are_same(found.model_dump(), expected.model_dump()) and text == expected.text
    assert [turn.sampled_ids for turn in turns] == [expected.model_extra["token_ids"]] * (2 if max_tokens else 0)
