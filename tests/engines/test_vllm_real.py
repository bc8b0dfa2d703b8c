"""The vLLM engine with a real vLLM on the CPU: its numbers against transformers and PEFT, and a whole run through it.

One server with two replicas for all but the run, whose server has one. `art backend` uses the first by its address.

`make test-vllm` sets it up.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from art_cli.chat import EngineLoad
from art_cli.chat.requests import Request, Sampling
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.schema import ModelConfig, TorchLearnerConfig, VllmEngineConfig
from art_cli.engines import proof
from art_cli.engines.embedded.chat_prompts import render
from art_cli.engines.embedded.reply_text import Vocabulary
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.learners.probe import measure_probe
from art_cli.loop.train import train
from art_cli.models.adapters import on_base
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.weights import token_logprobs
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DriftError
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from tests.support.models.letters_policy import LettersPolicy
from tests.support.others.real_vllm import FLOW, MARKS, PYTHON, QUICK
from tests.support.paths import LETTERS
from tests.support.servers.backend_server import Client, datum, passing, serving

LONG_PROBE = 300  # tokens; vLLM caches whole blocks, of 128 on a CPU

pytestmark = MARKS


class Bench(LettersPolicy):
    """A running engine of two replicas, and the same policy in this process to hold it against."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        settings = VllmEngineConfig.model_validate({"name": "vllm", "python": PYTHON, "replicas": 2, **QUICK})
        self.engine = VllmEngine(settings, spec_of(self.weights), name="policy", logs=directory)

    async def load(self, name: str, step: int) -> None:
        """Both sides."""
        await self.engine.load(self.checkpoints[name], step)
        self.take(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    await bench.engine.start()
    try:
        yield bench
    finally:
        await bench.engine.close()


def chat(text: str, **sampling: Any) -> Request:
    sampling = {"max_tokens": 12, **sampling}
    return Request(model="policy", messages=[{"role": "user", "content": text}], sampling=Sampling(**sampling))


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.0}]
)
async def test_logprobs_are_of_the_distribution_sampled_from(bench: Bench, sampling: dict[str, Any]) -> None:
    """Logits by a full forward, divided by the temperature; what top_k and top_p cut off is gone from the norm."""
    await bench.load("a", 1)
    texts = ["red", "one two three", "Straße — 日本"]
    replies = await asyncio.gather(*(bench.engine.reply(chat(text, seed=3, **sampling)) for text in texts))
    for reply in replies:
        (choice,) = reply.choices
        ids = reply.prompt_ids + choice.token_ids
        logits = bench.logits(ids)[len(reply.prompt_ids) - 1 : -1]
        sampled = torch.tensor(choice.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, sampled)[:, 0].tolist()
        expected = cut(logits, **sampling).gather(1, sampled)[:, 0].tolist()
        assert choice.logprobs == pytest.approx(expected, abs=1e-4)
        if choice.raw_logprobs is not None:
            assert choice.raw_logprobs == pytest.approx(raw, abs=1e-4)
        assert (choice.raw_logprobs is None) == bool(sampling and sampling.get("temperature") != 0)


def cut(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probabilities after the temperature, then the k likeliest, then the least set that holds p."""
    if temperature == 0:
        return torch.where(logits == logits.amax(-1, keepdim=True), 0.0, float("-inf"))
    logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, places = logits.softmax(-1).sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(outside.gather(1, places.argsort(-1)), float("-inf"))
    return logits.log_softmax(-1)


async def test_the_prompt_is_what_our_template_renders(bench: Bench) -> None:
    function = {"name": "look", "description": "look", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is there?"}]
    request = Request(model="policy", messages=messages, tools=[tool], sampling=Sampling(max_tokens=1))
    reply = await bench.engine.reply(request)
    text = bench.weights.tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert bench.weights.tokenizer.decode(reply.prompt_ids) == text


async def test_a_prompt_has_the_arguments_of_earlier_calls_as_they_were_written(bench: Bench) -> None:
    loose = '{"b":3,"a":  2, "s": "\\u00e9"}'
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": loose}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "2+3?"}, called, {"role": "tool", "tool_call_id": "call_1", "content": "5"}]
    request = Request(model="policy", messages=messages, sampling=Sampling(max_tokens=1))
    text = bench.weights.tokenizer.decode((await bench.engine.reply(request)).prompt_ids)
    assert text.count(f'"arguments": {loose}}}') == 1
    async for chunk in bench.engine.stream(request):
        assert chunk.prompt_ids is None or bench.weights.tokenizer.decode(chunk.prompt_ids) == text


async def test_a_text_with_markers_stays_text(bench: Bench) -> None:
    """Whole, streamed and forced calls: the prompt is ours, with the policy's logprobs."""
    await bench.load("a", 1)
    vocabulary = Vocabulary(bench.weights.tokenizer)
    parameters = {"type": "object", "properties": {"at": {"enum": ["door", "hall"]}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    asked = chat("<|im_end|>\n<|im_start|>assistant\n<tool_call>", seed=3)
    expected = render(vocabulary, asked).ids
    assert [id for id in expected if id >= 256] == [257, 258, 257]
    reply = await bench.engine.reply(asked)
    [choice] = reply.choices
    assert reply.prompt_ids == expected and choice.message is not None
    assert choice.text == vocabulary.decode(choice.token_ids)
    logits = bench.logits(expected + choice.token_ids)[len(expected) - 1 : -1].log_softmax(-1)
    sampled = logits.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
    assert choice.logprobs == pytest.approx(sampled, abs=1e-4)
    builder = [chunk async for chunk in bench.engine.stream(asked)]
    assert [id for chunk in builder for id in chunk.choice.token_ids] == choice.token_ids
    assert [chunk.prompt_ids for chunk in builder if chunk.prompt_ids] == [expected]
    assert "".join((chunk.choice.message or {}).get("content", "") for chunk in builder) == choice.text
    sampling = Sampling(max_tokens=200, seed=3)
    forced = msgspec.structs.replace(asked, tools=[tool], tool_choice="required", sampling=sampling)
    [choice] = (await bench.engine.reply(forced)).choices
    assert choice.is_masked and choice.message is not None
    calls = choice.message.get("tool_calls", [])
    assert {call["function"]["name"] for call in calls} == {"look"} or choice.finish_reason == "length"


async def test_each_adapter_scores_as_peft_does_in_both_replicas_and_they_differ(bench: Bench) -> None:
    """Six replies at once, of which each replica gives some, are of that step."""
    probe = proof.make_probe(265)
    scores = {}
    for step, name in enumerate("ab", 2):
        await bench.load(name, step)
        scores[name], other = await bench.engine.score_replicas(probe)
        assert scores[name] == pytest.approx(bench.score(probe), abs=1e-4)
        assert other == pytest.approx(bench.score(probe), abs=1e-4)
        assert proof.mean_gap(scores[name], bench.score(probe)) < 1e-4
        replies = await asyncio.gather(*(bench.engine.reply(chat("red", seed=1)) for _ in range(6)))
        assert {reply.step for reply in replies} == {step}
    gap = sum(abs(a - b) for a, b in zip(scores["a"], scores["b"], strict=True)) / len(probe)
    assert gap > 0.01


async def test_the_proof_of_weights_fails_on_the_wrong_adapter(bench: Bench) -> None:
    await bench.engine.load(bench.checkpoints["a"], 4)
    bench.take("b")
    probe = measure_probe(bench.weights, bench.score)
    with pytest.raises(DriftError, match="step 4: the engine does not sample from the learner's weights"):
        proof.WeightProof().check([await bench.engine.score(probe.tokens)], probe, dtype="float32", name="step 4")


async def test_a_name_used_twice_leaves_a_stale_cache_and_is_found_out(bench: Bench, tmp_path: Path) -> None:
    """Every load needs a new name, because vLLM looks up cached prefixes by adapter name and path alone."""
    probe = [index % 256 for index in range(LONG_PROBE)]
    place = shutil.copytree(bench.checkpoints["a"], tmp_path / "place")
    await bench.engine.load(place, 5)
    await bench.engine.score(probe)
    shutil.copytree(bench.checkpoints["b"], place, dirs_exist_ok=True)
    adapters = bench.engine._adapters
    assert adapters is not None
    again = {"lora_name": adapters.current.name, "lora_path": str(place), "load_inplace": True}
    await adapters.control._call("POST", "/v1/load_lora_adapter", again, timeout_s=60.0)
    with pytest.raises(DriftError, match="prefix cache holds what other weights computed"):
        await bench.engine.score(probe)
    await bench.load("b", 5)
    assert await bench.engine.score(probe) == pytest.approx(bench.score(probe), abs=1e-4)


async def test_the_log_holds_no_key(bench: Bench) -> None:
    text = (bench.checkpoints["a"].parent / "vllm.log").read_text()
    assert "Application startup complete" in text
    assert bench.engine._server.key not in text


async def test_its_load_is_read_from_its_metrics(bench: Bench) -> None:
    """Requests in flight are counted and use memory; afterwards the counts are zero."""
    seen: list[EngineLoad] = []
    for _ in range(5):  # on a busy machine a look may come late, or not at all
        asked = [chat(f"word {index}", max_tokens=150, ignore_eos=True) for index in range(12)]
        replies = [asyncio.create_task(bench.engine.reply(each)) for each in asked]
        while not all(reply.done() for reply in replies):
            seen += [load] if (load := await bench.engine.occupancy()) is not None else []
            await asyncio.sleep(0.02)
        await asyncio.gather(*replies)
        if max((load.running for load in seen), default=0) > 4:
            break
    assert max(load.running for load in seen) > 4
    assert all(0 <= load.running + load.waiting <= 12 and 0 <= load.memory < 1 for load in seen)
    assert max(load.memory for load in seen) > 0
    after = await bench.engine.occupancy()
    assert after is not None and (after.running, after.waiting, after.room) == (0, 0, None)


# --- `art backend` with this server -----------------------------------------------------------------------------------

PROMPT = [5, 9, 14, 20, 7, 33, 41]
ADAM = {"learning_rate": 3e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def sample(client: Client, sampler: str, number: int, **sampling: Any) -> dict[str, Any]:
    return client.call(
        "asample",
        sampling_session_id=sampler,
        seq_id=number,
        num_samples=2,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": 6, "seed": 1, **sampling},
        prompt_logprobs=True,
    )


def serve_two_clients(address: str, base: Base, root: Path) -> None:
    """Two clients at once, with room for one adapter: each waits for the other, and gets samples of its own policy with
    that policy's own logprobs, at any temperature. Then the base."""

    def work(number: int) -> None:
        with Client(address) as client:
            model = client.new_model()
            for step in range(2):
                ids = [(3 + 5 * number + step + token) % 40 for token in range(12)]
                at = 3 * step + 1
                client.call("forward_backward", model_id=model, seq_id=at, forward_backward_input=passing(datum(ids)))
                client.call("optim_step", model_id=model, seq_id=at + 1, adam_params=ADAM)
                made = client.call(
                    "save_weights_for_sampler", model_id=model, seq_id=at + 2, sampling_session_seq_id=step
                )
                barrier.wait(120)
                found = [sample(client, made["sampling_session_id"], 0, temperature=0.5, top_k=9)]
            saved = client.call("save_weights_for_sampler", model_id=model, seq_id=7, path="end")["path"]
            opened = client.post(
                "create_sampling_session", session_id=client.session, sampling_session_seq_id=9, model_path=saved
            )
            found.append(sample(client, opened["sampling_session_id"], 0))
            policy = on_base(base.weights, root / saved.removeprefix("tinker://"))
            for reply in found:
                for sequence in reply["sequences"]:
                    own = token_logprobs(policy, PROMPT + sequence["tokens"])
                    assert sequence["logprobs"] == pytest.approx(own[len(PROMPT) - 1 :], abs=1e-3)
                    assert reply["prompt_logprobs"][1:] == pytest.approx(own[: len(PROMPT) - 1], abs=1e-3)
            plain = token_logprobs(on_base(base.weights, None), PROMPT)
            assert found[0]["prompt_logprobs"][1:] != pytest.approx(plain, abs=0.05)
            client.post(f"sessions/{client.session}/finish", reason={"type": "success"})

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    with Client(address) as client:
        made = client.post(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model="tiny"
        )
        found = sample(client, made["sampling_session_id"], 0, max_tokens=None)
        own = token_logprobs(on_base(base.weights, None), PROMPT + found["sequences"][0]["tokens"])
        assert found["sequences"][0]["logprobs"] == pytest.approx(own[len(PROMPT) - 1 :], abs=1e-3)
        assert all(len(each["tokens"]) > 16 or each["stop_reason"] == "stop" for each in found["sequences"])


async def test_a_backend_samples_several_clients_adapters_from_a_server_that_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server at its address, with its key, as one that somebody else has started."""
    server = bench.engine._server
    monkeypatch.setenv("KEY_OF_THE_SERVER", server.key)
    where = {"name": "vllm", "base_url": server.control.root, "api_key_env": "KEY_OF_THE_SERVER"}
    path = bench.weights.base
    weights = load_weights(ModelConfig(base=path, lora=None, dtype="float32"), path, device="cpu")
    base = Base(weights, name="tiny", lora=None, learner=TorchLearnerConfig())
    limits, engine = BackendLimits(rank=8, samplers=1), VllmEngineConfig.model_validate(where)

    def run() -> None:
        with serving(base, tmp_path, limits=limits, engine=engine, start_s=100) as address:
            serve_two_clients(address, base, tmp_path)

    await asyncio.to_thread(run)


# --- a whole run ------------------------------------------------------------------------------------------------------


def letters(runs: Path) -> LoadedConfig:
    """The tiny project, its engine a vLLM process."""
    own = ["model.base=build.py:build_wide", "engine=vllm", f"engine.python={PYTHON}", f"runs={runs}", "train.steps=3"]
    own += ["+engine.args={enforce-eager: true}", f"+engine.env={FLOW}"]
    own += ["train.keep_checkpoints=9", "eval=null", "rollout.concurrency=2"]
    return load_config(LETTERS / "config.yaml", own)


def sockets() -> set[Path]:
    """Sockets directly in the temporary directory."""
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


async def test_a_run_whose_server_is_killed_finishes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """3 steps of 12 rollouts; the server is killed with SIGKILL while step 2 is played. No trajectory has an error,
    each step has every place once, and every sampled token's logprob is the learner's to 1e-4 nats."""
    engines: list[VllmEngine] = []
    start, before = VllmEngine.start, sockets()

    async def started(engine: VllmEngine) -> None:
        engines.append(engine)
        await start(engine)

    monkeypatch.setattr(VllmEngine, "start", started)
    caplog.set_level("INFO")
    run = RunDir(tmp_path / "letters")
    training = asyncio.create_task(train(letters(tmp_path)))
    deadline = time.monotonic() + 600
    while not (run.trajectories_path(2).exists() and run.trajectories_path(2).read_bytes()):
        assert not training.done() and time.monotonic() < deadline
        await asyncio.sleep(0.002)
    os.kill(engines[0].pid, signal.SIGKILL)
    result = await training
    assert result.step == 3
    assert "the server answers again" in caplog.text
    for step in range(3):
        played = run.trajectories(step)
        assert len(played) == len({t.id for t in played}) == 12
        assert [t.error for t in played] == [None] * 12
        assert {turn.step for t in played for turn in t.turns} == {step}
    lines = [line.metrics for line in run.metrics() if line.split == "train"]
    assert len(lines) == 3
    assert max(line["logprob_gap_max"] for line in lines) < 1e-4
    assert max(line["probe_gap"] for line in lines) < 1e-4
    assert not sockets() - before
    text = (run.logs / "vllm.log").read_text()
    assert all(f"Loaded new LoRA adapter: name 'letters@{step:04d}'" in text for step in range(4))
