"""What `art serve` serves: each name its own weights, found from files, changed as a run goes on."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.cli import app as cli
from art_cli.config.schema import EmbeddedEngineConfig, VllmEngineConfig
from art_cli.models.saved_weights import save_weights
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError, CheckpointError, UsageError
from art_cli.serving import served_policies
from art_cli.serving.dispatch import Dispatch
from art_cli.serving.middleware import Admission, Meter
from art_cli.serving.served_model import Source, find_source
from art_cli.serving.served_policies import Loader, Policies, ServedPolicy, engine_config, read_knobs
from tests.support.models.tiny import tiny_weights
from tests.support.processes.waiting import until
from tests.support.servers.served import ScriptedEngine, ScriptedLoader, add_checkpoint, make_run, scripted_source
from tests.support.servers.serving import (
    TOOLS,
    USER,
    Gate,
    client,
    fetch,
    greedy,
    number,
    say,
    serving,
)


async def test_each_name_answers_with_its_own_weights_on_one_base(tmp_path: Path) -> None:
    """Newest, best and bare base of one run, at once: each says what transformers says from its files."""
    run = make_run(tmp_path / "mine", (1, 2), rewards={1: 0.9, 2: 0.1})
    loader = Loader(EmbeddedEngineConfig(max_batch=4), logs=Path("/nowhere"))
    sources = [
        find_source(f"newest={run.root}", which="newest"),
        find_source(f"best={run.root}", which="best"),
        find_source(f"base={run.base}"),
    ]
    async with serving(*sources, loader=loader) as (service, root), client(root) as ai:
        assert [model.id async for model in ai.models.list()] == ["newest", "best", "base"]
        said = await asyncio.gather(*(say(ai, name, max_tokens=8) for name in ("newest", "best", "base")))
        with pytest.raises(openai.NotFoundError, match="there is 'newest', 'best', 'base'"):
            await say(ai, "mine")
    assert said == [greedy(run, 2), greedy(run, 1), greedy(run, None)]
    assert len(set(said)) == 3
    assert len(loader._bases) == 1
    shares = {
        policy._generation.engine._weights.model.get_input_embeddings().weight.data_ptr()  # type: ignore[union-attr]
        for policy in service.policies.served.values()
    }
    assert len(shares) == 1


@pytest.mark.parametrize("is_base_first", [False, True], ids=["adapter-first", "base-first"])
async def test_a_chat_template_stays_with_its_own_policy(tmp_path: Path, is_base_first: bool) -> None:
    """The base has its own, although the adapter that stands on it has another one."""
    run = make_run(tmp_path / "mine", (1,))
    own = "{# its own #}" + (other := (run.checkpoint_path(1) / "chat_template.jinja").read_text())
    (run.base / "chat_template.jinja").write_text(own)
    trained, base = find_source(str(run.checkpoint_path(1))), find_source(f"base={run.base}")
    loader = Loader(EmbeddedEngineConfig(), logs=Path("/nowhere"))
    sources = [base, trained] if is_base_first else [trained, base]
    found = {source.name: loader._weights(source).tokenizer.chat_template for source in sources}
    assert found == {trained.name: other, "base": own}
    assert len(loader._bases) == 1


@pytest.mark.slow
async def test_the_whole_protocol_through_the_real_engine(run: RunDir) -> None:
    """Streaming, tools, logprobs, stop, n, seed and usage, as the openai client sees them."""
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        whole = await ai.chat.completions.create(
            model="mine", messages=[USER], tools=TOOLS, n=3, seed=7, logprobs=True, top_logprobs=2, max_tokens=6
        )
        options = {"tools": TOOLS, "seed": 7, "max_tokens": 6, "stream_options": {"include_usage": True}}
        stream = await ai.chat.completions.create(model="mine", messages=[USER], stream=True, **options)
        chunks = [chunk async for chunk in stream]
        text = await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1, logprobs=1)
        letters = (await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1)).choices[0].text
        letter = next(letter for letter in letters[1:] if letter.isascii())
        cut = await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1, stop=[letter])
        forced = await ai.chat.completions.create(
            model="mine", messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=4
        )
    assert whole.usage and whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)  # type: ignore[union-attr, arg-type, misc]
    first = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == first
    assert chunks[-1].usage and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert text.choices[0].logprobs and all(value <= 0 for value in text.choices[0].logprobs.token_logprobs or [1])
    assert text.choices[0].text == letters
    assert cut.choices[0].text == letters[: letters.index(letter)]
    assert cut.choices[0].finish_reason == "stop"
    assert forced.choices[0].finish_reason == "length"


async def test_requests_that_do_not_say_are_sampled_as_in_training(run: RunDir, tmp_path: Path) -> None:
    """The run's rollout.sampling.max_tokens is 8, for its base too; a base model of no run has no such limit."""
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        reply = await ai.completions.create(model="mine", prompt="abc", seed=3)
    assert reply.usage and reply.usage.completion_tokens <= 8
    assert find_source(str(run.root)).defaults == Sampling(max_tokens=8)
    assert find_source(str(run.base)).defaults == Sampling(max_tokens=8)
    bare = shutil.copytree(run.base, tmp_path / "bare")
    assert find_source(str(bare)).defaults == Sampling()


def test_a_source_is_what_the_files_say(run: RunDir, tmp_path: Path) -> None:
    newest = find_source(str(run.root), which="newest")
    assert newest.name == "mine"
    assert (newest.base, newest.adapter, newest.step) == (str(run.base), run.checkpoint_path(2), 2)
    assert find_source(str(run.checkpoint_path(1))).step == 1
    moved = find_source(str(run.root), base="org/other", dtype="bfloat16")
    assert (moved.base, moved.dtype, newest.dtype) == ("org/other", "bfloat16", "auto")
    assert find_source("Qwen/Qwen3-0.6B").base == "Qwen/Qwen3-0.6B"
    assert find_source("q=Qwen/Qwen3-0.6B").name == "q"
    plain = tmp_path / "plain"
    save_weights(tiny_weights(), plain)
    with pytest.raises(CheckpointError, match="does not name its base model; give --base"):
        find_source(str(plain))
    assert find_source(str(plain), base=str(run.base)).adapter == plain
    (tmp_path / "a=b").mkdir()
    with pytest.raises(CheckpointError, match="a=b: no checkpoint"):
        find_source(str(tmp_path / "a=b"))


@pytest.mark.parametrize("text", ["./nothing", "/nothing", "a/b/c", "x=", "n@me!=org/model", ""])
def test_what_is_neither_a_directory_nor_a_hub_id_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="no such directory, and not a hub id|expected NAME=CHECKPOINT"):
        find_source(text)


def test_a_name_is_served_once(run: RunDir) -> None:
    loader = ScriptedLoader()
    with pytest.raises(UsageError, match="mine: served twice"):
        Policies([ServedPolicy(find_source(str(run.checkpoint_path(step))), loader) for step in (1, 2)])  # type: ignore[arg-type]


@pytest.mark.slow
async def test_all_weights_in_a_checkpoint_are_served_without_a_base(tmp_path: Path) -> None:
    """A run with lora null: the checkpoint is a whole model; nothing else is read."""
    run = make_run(tmp_path / "whole", ())
    save_weights(tiny_weights(seed=3, lora_rank=None), tmp_path / "other")
    with new_checkpoint(run.checkpoint_path(1), Manifest(step=1, base="gone", config_hash="")) as directory:
        save_weights(tiny_weights(seed=3, lora_rank=None), directory)
    async with (
        serving(find_source(str(run.root)), find_source(f"same={tmp_path}/other")) as (_, root),
        client(root) as ai,
    ):
        assert await say(ai, "whole", max_tokens=8) == await say(ai, "same", max_tokens=8)


async def test_what_cannot_be_loaded_ends_the_service(run: RunDir, tmp_path: Path) -> None:
    """A base of another shape: one line, before anything was answered."""
    save_weights(tiny_weights(lora_rank=None, hidden=64), tmp_path / "wide")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        async with serving(find_source(str(run.root), base=str(tmp_path / "wide"))):
            pass


# --- following a run --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_following_changes_to_each_new_checkpoint_and_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests all the while, a stream across the change: each answer is one checkpoint's and says whose.

    The stream of 200 tokens begins at step 1 and ends as step 1, token for token, after step 2 has answered others.
    """
    monkeypatch.setattr(served_policies, "POLL_S", 0.05)
    run = make_run(tmp_path / "mine", (1,))
    said: dict[str, list[tuple[str, int]]] = {"one": [], "two": []}  # by who asked; each asks one call after another
    knobs: dict[str, Any] = {"model": "mine", "messages": [USER], "temperature": 0}
    knobs["extra_body"] = {"return_token_ids": True}
    async with (
        serving(find_source(str(run.root), which="newest"), follows="newest") as (service, root),
        client(root) as ai,
    ):
        expected = await say(ai, "mine", max_tokens=200)

        async def ask_once(who: str) -> None:
            reply = await ai.chat.completions.create(**knobs, max_tokens=8)
            said[who].append((reply.choices[0].message.content or "", reply.model_extra["step"]))

        async def ask(who: str) -> None:
            while service.policies.served["mine"].source.step < 3:
                await ask_once(who)

        stream = await ai.chat.completions.create(**knobs, max_tokens=200, stream=True)
        chunks = [await anext(aiter(stream))]
        asking = [asyncio.create_task(ask(who)) for who in said]
        for step in (2, 3):
            add_checkpoint(run, step)
            await until(lambda step=step: service.policies.served["mine"].source.step == step)
        await asyncio.gather(*asking)
        chunks += [chunk async for chunk in stream]
        await asyncio.gather(*map(ask_once, said))
        ready, metrics = json.loads(await fetch(f"{root}/ready")), await fetch(f"{root}/metrics")
        await until(lambda: not service.policies.served["mine"]._retiring)
    answers = {step: greedy(run, step) for step in (1, 2, 3)}
    for heard in said.values():
        steps = [step for _, step in heard]
        assert [text for text, _ in heard] == [answers[step] for step in steps]
        assert steps == sorted(steps) and steps[-1] == 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert {chunk.model_extra["step"] for chunk in chunks} == {1}
    assert ready["models"] == [{"id": "mine", "step": 3}]
    assert number(metrics, "art_checkpoint_changes_total", model="mine") == 2
    assert number(metrics, "art_policy_step", model="mine") == 3


async def test_an_engine_that_was_replaced_is_closed_when_its_last_request_ends() -> None:
    gate = Gate()
    loader = ScriptedLoader(gate)
    policy = ServedPolicy(scripted_source(step=1), loader)  # type: ignore[arg-type]
    dispatch = Dispatch(Policies([policy]), Admission(concurrency=2, queue=0), Meter(), logs_content=False)
    await policy.start()
    request = Request(model="policy", messages=[USER], sampling=Sampling())
    old = asyncio.create_task(dispatch.reply(request))
    await until(lambda: gate.num_waiting == 1)
    await policy.change(scripted_source(step=2))
    new = asyncio.create_task(dispatch.reply(request))
    await until(lambda: gate.num_waiting == 2)
    assert [engine.is_closed for engine in loader.engines] == [False, False]
    gate.is_open.set()
    await asyncio.gather(old, new)
    await until(lambda: loader.engines[0].is_closed)
    assert not loader.engines[1].is_closed
    await policy.close()
    assert loader.engines[1].is_closed


@pytest.mark.slow
async def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 has a flipped byte, step 3 is of another shape; step 4 is good."""
    monkeypatch.setattr(served_policies, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,))
    async with (
        serving(find_source(str(run.root), which="newest"), follows="newest") as (service, root),
        client(root) as ai,
    ):
        policy = service.policies.served["mine"]
        broken = tmp_path / "aside"
        add_checkpoint(run, 2).rename(broken)
        data = bytearray((broken / "adapter_model.safetensors").read_bytes())
        data[-1] ^= 1
        (broken / "adapter_model.safetensors").write_bytes(bytes(data))
        broken.rename(run.checkpoint_path(2))
        await until(lambda: "does not match its hash" in caplog.text)
        with new_checkpoint(run.checkpoint_path(3), Manifest(step=3, base="../../base", config_hash="")) as directory:
            save_weights(tiny_weights(hidden=64), directory)
        await until(lambda: "stays at step 1" in caplog.text)
        assert policy.source.step == 1
        assert await say(ai, "mine", max_tokens=8) == greedy(run, 1)
        add_checkpoint(run, 4)
        await until(lambda: policy.source.step == 4)
        assert await say(ai, "mine", max_tokens=8) == greedy(run, 4)
    assert caplog.text.count("stays at step 1") == 1  # once, not at every look


async def test_following_the_best_waits_for_a_better_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_policies, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,), rewards={1: 0.5})
    source = find_source(str(run.root), which="best")
    async with serving(source, loader=ScriptedLoader(), follows="best") as (service, _):
        add_checkpoint(run, 2)
        run.append_metrics(2, "eval", {"reward": 0.4})
        await asyncio.sleep(10 * served_policies.POLL_S)
        assert service.policies.served["mine"].source.step == 1
        add_checkpoint(run, 3)
        run.append_metrics(3, "eval", {"reward": 0.6})
        await until(lambda: service.policies.served["mine"].source.step == 3)


class Unlucky(ScriptedLoader):
    """Its engine of step 2 is there at the third try."""

    num_tries = 0

    async def make(self, source: Source) -> ScriptedEngine:
        self.num_tries += source.step == 2
        if source.step == 2 and self.num_tries < 3:
            raise MemoryError("no room")
        return await super().make(source)


async def test_following_goes_on_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's metrics cannot be read for a while, and then there is no memory for the engine of step 2."""
    monkeypatch.setattr(served_policies, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,), rewards={1: 0.5})
    source = find_source(str(run.root), which="best")
    async with serving(source, loader=Unlucky(), follows="best") as (service, _):
        aside = run.metrics_path.rename(tmp_path / "aside")
        run.metrics_path.mkdir()
        await until(lambda: "not a regular file" in caplog.text)
        add_checkpoint(run, 2)
        run.metrics_path.rmdir()
        aside.rename(run.metrics_path)
        run.append_metrics(2, "eval", {"reward": 0.6})
        await until(lambda: service.policies.served["mine"].source.step == 2)
    assert caplog.text.count("not a regular file") == caplog.text.count("MemoryError: no room") == 1


async def test_a_step_that_failed_is_served_once_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """M3: a step is another one when its checkpoint is, as after a loss."""
    monkeypatch.setattr(served_policies, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,))
    source = find_source(str(run.root), which="newest")
    async with serving(source, loader=ScriptedLoader(), follows="newest") as (service, _):
        add_checkpoint(run, 2).rename(aside := tmp_path / "aside")
        (aside / "adapter_model.safetensors").write_bytes(b"damaged")
        aside.rename(run.checkpoint_path(2))
        await until(lambda: "passed over a checkpoint" in caplog.text)
        await asyncio.sleep(0.2)
        assert service.policies.served["mine"].source.step == 1 and caplog.text.count("passed over") < 5
        run.checkpoint_path(2).rename(tmp_path / "lost")
        add_checkpoint(run, 2)
        await until(lambda: service.policies.served["mine"].source.step == 2)


def test_only_a_run_can_be_followed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", str(run.base), "--follow"]) == 2
    assert "--follow: name a run" in capsys.readouterr().err


# --- the engine -------------------------------------------------------------------------------------------------------


def test_the_engine_is_set_up_as_in_the_run_it_was_trained_with() -> None:
    trained = {"name": "embedded", "max_batch": 7, "prefill_tokens": 9}
    assert engine_config("embedded", {}, trained) == EmbeddedEngineConfig(max_batch=7, prefill_tokens=9)
    assert engine_config("embedded", {"max_batch": 3}, {"name": "vllm"}) == EmbeddedEngineConfig(max_batch=3)
    for key in ("base_url", "url"):
        elsewhere = {"name": "vllm", key: "http://elsewhere", "sleep": 1}
        forced = engine_config("vllm", {"python": "/opt/python"}, elsewhere)
        assert isinstance(forced, VllmEngineConfig)
        assert (forced.base_url, str(forced.python)) == (None, "/opt/python")
    for name, knobs, message in (
        ("fast", [], "--engine fast: one of auto, embedded, vllm"),
        ("embedded", ["max_batch"], "expected KEY=VALUE"),
        ("embedded", ["max_batch=0"], r"--set max_batch: .*\(engine embedded\)"),
        ("embedded", ["speed=9"], "--set speed: "),
    ):
        with pytest.raises(UsageError, match=message):
            engine_config(name, read_knobs(knobs), {})


def test_errors_of_serving_are_lines(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in (
        ([str(run.root), "--dtype", "int8"], 2, "--dtype int8: one of"),
        ([str(tmp_path)], 1, "no checkpoint (manifest.json), run"),
        ([f"a={run.root}", "b=builtin:tiny", "--engine", "vllm"], 2, "serves adapters on one base"),
        ([str(run.checkpoint_path(1)), "--best"], 2, "--best picks among"),
    ):
        assert cli.run(["serve", *arguments]) == code
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert issubclass(UsageError, ArtError)
