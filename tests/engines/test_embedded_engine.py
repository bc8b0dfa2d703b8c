"""The embedded engine as its users see it: requests in, replies out, compared with transformers on the same weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.models.saved_weights import save_weights
from art_cli.models.weights import Weights
from art_cli.runtime.errors import CheckpointError, EngineError
from tests.support.models.tiny import tiny_tokenizer, tiny_weights

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


def text_request(prompt: list[int], **sampling: Any) -> Request:
    return Request(model="policy", prompt=prompt, sampling=Sampling(**sampling), user_set=frozenset(sampling))


def change(weights: Weights, scale: float = 1.0) -> None:
    """Another policy: every adapter's B moved by a fixed noise, as a learner would, without telling anyone."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in weights.model.named_parameters():
            if "lora_B" in name:
                parameter += scale * 0.1 * torch.randn(parameter.shape, generator=generator)


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


async def test_turns_that_reuse_a_prefix_have_the_logprobs_of_a_full_forward() -> None:
    """Four concurrent conversations with four turns, two of them identical; every turn includes the earlier turns."""
    weights = tiny_weights()
    async with running(weights) as engine:
        histories = [list(f"talk {index // 2}: ".encode() * 20) for index in range(4)]
        for turn in range(4):
            replies = await asyncio.gather(
                *(engine.reply(text_request(history, max_tokens=9, seed=turn)) for history in histories)
            )
            for history, reply in zip(histories, replies, strict=True):
                choice = reply.choices[0]
                assert choice.logprobs == pytest.approx(full_logprobs(weights, history, choice.token_ids), abs=1e-5)
                history += [*choice.token_ids, 10, 11, 12]


async def test_changed_weights_are_sampled_from_at_once() -> None:
    """The same prompt before and after: its cached keys and values must not come back."""
    weights = tiny_weights()
    async with running(weights) as engine:
        request = chat("the same prompt each time, long enough to be worth keeping", seed=1)
        await engine.reply(request)
        with weights.lock:
            change(weights)
            weights.version += 1
        reply = await engine.reply(request)
    choice = reply.choices[0]
    assert choice.logprobs == pytest.approx(full_logprobs(weights, reply.prompt_ids, choice.token_ids), abs=1e-5)


async def test_the_test_above_notices_a_stale_cache() -> None:
    """Without raising `version` the old prefix is used, and the logprobs are off by far more than 1e-5."""
    weights = tiny_weights()
    async with running(weights) as engine:
        request = chat("the same prompt each time, long enough to be worth keeping", seed=1)
        await engine.reply(request)
        change(weights)
        reply = await engine.reply(request)
    choice = reply.choices[0]
    expected = full_logprobs(weights, reply.prompt_ids, choice.token_ids)
    assert max(abs(a - b) for a, b in zip(choice.logprobs, expected, strict=True)) > 1e-3


async def test_a_load_marks_the_step_and_drops_the_caches() -> None:
    weights = tiny_weights()
    async with running(weights) as engine:
        request = chat("the same prompt each time, long enough to be worth keeping", seed=1)
        assert (await engine.reply(request)).step == 0
        change(weights)
        await engine.load(Path("nowhere"), 7)  # shared weights: nothing is read
        reply = await engine.reply(request)
        assert (reply.step, engine.endpoint.step) == (7, 7)
    choice = reply.choices[0]
    assert choice.logprobs == pytest.approx(full_logprobs(weights, reply.prompt_ids, choice.token_ids), abs=1e-5)


@pytest.mark.slow
async def test_a_rest_frees_the_cache_also_under_a_running_request() -> None:
    """The request continues: same tokens and same logprobs as without the pause."""
    weights = tiny_weights()
    async with running(weights) as engine:
        request = chat("hello", seed=1, max_tokens=300)
        undisturbed = (await engine.reply(request)).choices[0]
        stream = engine.stream(request)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) in (1, 50, 51):
                await engine.sleep()
        assert engine._runner is not None and engine._runner.cache.keys
        await engine.sleep()
        assert not engine._runner.cache.keys
    assert [id for chunk in chunks for id in chunk.choice.token_ids] == undisturbed.token_ids
    logprobs = [value for chunk in chunks for value in chunk.choice.logprobs]
    assert logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)


async def test_weights_of_its_own_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    trained = tiny_weights()
    change(trained)
    save_weights(trained, tmp_path)
    probe = list(b"a probe sequence")
    engine = EmbeddedEngine(tiny_weights(), name="policy", config=EmbeddedEngineConfig(), shares_weights=False)
    await engine.start()
    try:
        before = await engine.score(probe)
        await engine.load(tmp_path, 3)
        after = await engine.score(probe)
        with pytest.raises(CheckpointError):
            await engine.load(tmp_path / "none", 4)
        assert engine.endpoint.step == 3
    finally:
        await engine.close()
    expected = full_logprobs(trained, probe[:1], probe[1:])
    assert after == pytest.approx(expected, abs=1e-5)
    assert before != pytest.approx(expected, abs=1e-2)


async def test_no_reply_of_the_embedded_engine_is_sampled_from_two_policies(tmp_path: Path) -> None:
    """A long reply in flight during a load finishes under the old weights; the next reply uses the new weights."""
    changed = tiny_weights()
    change(changed)
    save_weights(changed, tmp_path)
    engine = EmbeddedEngine(tiny_weights(), name="policy", config=EmbeddedEngineConfig(), shares_weights=False)
    await engine.start()
    try:
        asked = chat(max_tokens=300, temperature=0.0, ignore_eos=True)
        before = await engine.reply(asked)
        stream = engine.stream(asked)
        chunks = [await anext(stream)]
        loading = asyncio.create_task(engine.load(tmp_path, 1))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(engine.reply(asked))
        chunks += [chunk async for chunk in stream]
        await loading
        after = await late
    finally:
        await engine.close()
    assert [id for chunk in chunks for id in chunk.choice.token_ids] == before.choices[0].token_ids
    assert {chunk.step for chunk in chunks} == {0} and after.step == 1
    assert after.choices[0].token_ids != before.choices[0].token_ids


async def test_the_probe_is_scored_as_by_a_full_forward() -> None:
    weights = tiny_weights()
    async with running(weights) as engine:
        for probe in (list(range(200)), list(range(200)) * 6, list(range(171)) * 3, [5, 6], [7]):
            assert await engine.score(probe) == pytest.approx(full_logprobs(weights, probe[:1], probe[1:]), abs=1e-5)


async def test_sampling_changes_no_weight_and_leaves_training_possible() -> None:
    """Parameters trained in this process must not become inference tensors, and their attention must be restored."""
    weights = tiny_weights()
    before = {name: parameter.clone() for name, parameter in weights.model.named_parameters()}
    attention = weights.model.config._attn_implementation
    async with running(weights) as engine:
        await engine.reply(chat())
        await engine.score([1, 2, 3])
    assert weights.model.config._attn_implementation == attention
    for name, parameter in weights.model.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.is_inference()
    weights.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for name, p in weights.model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5)])
async def test_logprobs_are_of_what_was_sampled_from(temperature: float, top_p: float, top_k: int) -> None:
    """Recomputed by transformers' cuts from a full forward's logits."""
    weights = tiny_weights()
    async with running(weights) as engine:
        reply = await engine.reply(chat(temperature=temperature, top_p=top_p, top_k=top_k, seed=2))
    choice = reply.choices[0]
    with torch.no_grad():
        logits = weights.model(torch.tensor([reply.prompt_ids + choice.token_ids])).logits[0].double()
    rows = TemperatureLogitsWarper(temperature)(None, logits[len(reply.prompt_ids) - 1 : -1])
    rows = TopKLogitsWarper(top_k)(None, rows) if top_k else rows
    rows = TopPLogitsWarper(top_p)(None, rows) if top_p < 1 else rows
    expected = rows.log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
    assert choice.logprobs == pytest.approx(expected, abs=1e-4)
    assert choice.raw_logprobs == pytest.approx(full_logprobs(weights, reply.prompt_ids, choice.token_ids), abs=1e-5)


async def test_more_requests_than_slots_all_come_out_right() -> None:
    """17 requests in 3 slots, prompts in chunks of 7 tokens: each as if alone."""
    weights = tiny_weights()
    requests = [chat(word, temperature=0.0, max_tokens=12) for word in WORDS * 3][:17]
    async with running(weights, max_batch=3, prefill_tokens=7) as engine:
        replies = await asyncio.gather(*map(engine.reply, requests))
    for reply in replies:
        expected = weights.model.generate(torch.tensor([reply.prompt_ids]), max_new_tokens=12, do_sample=False)
        assert reply.prompt_ids + reply.choices[0].token_ids == expected[0].tolist()


async def test_a_cancelled_request_frees_its_slot() -> None:
    """One slot: the second request must wait until the 900-token request is cancelled."""
    async with running(max_batch=1) as engine:
        long = asyncio.create_task(engine.reply(chat(max_tokens=900, temperature=0.0, stop=("never seen",))))
        stream = engine.stream(chat(max_tokens=900, temperature=0.0))
        assert engine._thread is not None
        scheduler = engine._thread._scheduler
        async with asyncio.timeout(20):
            while not scheduler.running:
                await asyncio.sleep(0.005)
        (left,) = scheduler.running.values()
        waiting = asyncio.create_task(anext(stream))
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        await asyncio.wait_for(waiting, 20)
        assert left.slot == -1 and scheduler.num_sampled(left) < 900
        await stream.aclose()
        reply = await engine.reply(chat("short", max_tokens=2))
        assert reply.choices[0].token_ids


async def test_a_stop_string_ends_the_reply_and_its_tokens_stay() -> None:
    """The text ends before the stop string; the tokens that wrote it are recorded as sampled."""
    async with running() as engine:
        whole = (await engine.reply(chat(seed=0, max_tokens=40))).choices[0]
        stop = next(letter for letter in whole.text[4:] if letter.isascii() and letter not in whole.text[:4])
        cut = (await engine.reply(chat(seed=0, max_tokens=40, stop=(stop,)))).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, whole.finish_reason) == ("stop", "length")
    assert (cut.stop_string, whole.stop_string) == (stop, None)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 40


async def test_the_stop_token_is_recorded_and_not_shown() -> None:
    """258 is a stop token, unlike 256: a model that prefers 258 stops with reason stop."""
    weights = tiny_weights()
    with torch.no_grad():
        head = weights.model.get_output_embeddings().weight
        head[258] = 10 * head.abs().max(dim=0).values
    async with running(weights) as engine:
        replies = await asyncio.gather(*(engine.reply(chat(seed=seed, max_tokens=200)) for seed in range(8)))
    ended = [reply.choices[0] for reply in replies if reply.choices[0].finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert choice.token_ids[-1] == 258 and 258 not in choice.token_ids[:-1]
        assert "<|im_end|>" not in choice.text and len(choice.logprobs) == len(choice.token_ids)


async def test_several_answers_share_the_prompt_and_differ() -> None:
    async with running() as engine:
        reply = await engine.reply(chat(seed=4, n=3))
        single = await engine.reply(chat(seed=4))
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in reply.choices}) == 3
    assert reply.choices[0].token_ids == single.choices[0].token_ids


@pytest.mark.parametrize(("is_processed", "scale"), [(False, 1.0), (True, 2.0)])
async def test_top_logprobs_are_the_likeliest_tokens(is_processed: bool, scale: float) -> None:
    """Under softmax(logits), or under softmax(logits / temperature) where what was sampled from is to be reported."""
    weights = tiny_weights()
    request = chat(seed=4, wants_logprobs=True, top_logprobs=3, max_tokens=5, temperature=2.0)
    async with running(weights) as engine:
        reply = await engine.reply(msgspec.structs.replace(request, is_processed=is_processed))
    choice = reply.choices[0]
    with torch.no_grad():
        logits = weights.model(torch.tensor([reply.prompt_ids + choice.token_ids])).logits[0]
    expected = (logits[len(reply.prompt_ids) - 1 : -1] / scale).log_softmax(-1).topk(3).values.tolist()
    assert choice.top_logprobs is not None and len(choice.tokens) == len(choice.token_ids)
    for likeliest, values in zip(choice.top_logprobs, expected, strict=True):
        assert [value for _, value in likeliest] == pytest.approx(values, abs=1e-5)


async def test_a_failing_model_fails_every_request_and_the_engine() -> None:
    weights = tiny_weights()
    async with running(weights) as engine:
        with torch.no_grad():
            weights.model.get_input_embeddings().weight[:] = float("nan")
        outcomes = await asyncio.gather(*(engine.reply(chat(word)) for word in WORDS), return_exceptions=True)
        assert all(isinstance(outcome, ChatError) and outcome.status == 500 for outcome in outcomes)
        with pytest.raises(EngineError, match="not finite"):
            await engine.score([1, 2])


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "Phi3", "Olmo2"])
async def test_other_architectures_are_served_as_transformers_runs_them(name: str) -> None:
    """Gemma3 and Mistral look back a window of 8 tokens only; prompts are longer than that."""
    weights = other_weights(name)
    async with running(weights, prefill_tokens=16) as engine:
        requests = [text_request(list(range(start, start + 30)), max_tokens=20, temperature=0.0) for start in (1, 9)]
        replies = await asyncio.gather(*map(engine.reply, requests))
    for reply in replies:
        ids = reply.prompt_ids + reply.choices[0].token_ids
        with torch.no_grad():
            logits = weights.model(torch.tensor([ids])).logits[0, len(reply.prompt_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == reply.choices[0].token_ids


def other_weights(name: str) -> Weights:
    shape: dict[str, Any] = {
        "vocab_size": 265, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258,
    }  # fmt: skip
    if name in ("Gemma3", "Mistral"):
        shape["sliding_window"] = 8
    if name == "Gemma3":
        shape["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if name in ("Phi3", "Olmo2"):
        del shape["head_dim"]
    suffix = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{suffix}Config")(**shape)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    cpu = torch.device("cpu")
    return Weights(model, tiny_tokenizer(), cpu, torch.float32, max_length=256, base=name, has_adapter=False)


async def test_a_model_without_attention_to_replace_is_refused() -> None:
    """Mamba keeps a state instead of keys and values."""
    config = transformers.MambaConfig(vocab_size=265, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config)
    weights = Weights(model, tiny_tokenizer(), torch.device("cpu"), torch.float32, 64, "mamba", has_adapter=False)
    with pytest.raises(EngineError, match="Mamba"):
        await EmbeddedEngine(weights, name="m", config=EmbeddedEngineConfig()).start()


async def test_a_seeded_request_is_the_same_alone_and_in_company() -> None:
    async with running() as engine:
        alone = await engine.reply(chat("hello", seed=7, temperature=0.8))
        company = [engine.reply(chat(word, seed=index)) for index, word in enumerate(WORDS * 3)]
        shared, *_ = await asyncio.gather(engine.reply(chat("hello", seed=7, temperature=0.8)), *company)
        other = await engine.reply(chat("hello", seed=8, temperature=0.8))
    assert shared.choices[0].token_ids == alone.choices[0].token_ids
    assert other.choices[0].token_ids != alone.choices[0].token_ids


@pytest.mark.slow
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
            for name in ("text", "message", "token_ids", "tokens", "finish_reason", "stop_string"):
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
    assert (
        len(clipped.choices[0].token_ids) <= 24
    )  # 1024 - 1000: the remaining context, because the client set no limit


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
