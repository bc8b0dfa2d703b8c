"""A reply names the digest of its weights, which were proven by scoring; other weights are found and do not answer."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import HttpBackend
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.requests import Request, Sampling
from art_cli.config.compose import load_config
from art_cli.config.schema import ModelConfig
from art_cli.loop.train import train
from art_cli.models.loading import load_weights
from art_cli.models.saved_weights import save_weights
from art_cli.runs.manifest import Origin, digest_of, new_checkpoint, policy_digest, read_manifest
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError, CheckpointError, DriftError
from art_cli.serving.served_model import Source, find_source
from art_cli.serving.served_policies import ServedPolicy
from tests.support.paths import LETTERS
from tests.support.servers.served import ScriptedEngine, ScriptedLoader
from tests.support.servers.serving import serving

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two steps in float32, with each of its three checkpoints."""
    runs = tmp_path_factory.mktemp("runs")
    loaded = load_config(LETTERS / "config.yaml", [f"runs={runs}", "train.steps=2", "eval.every=1"])
    return RunDir(asyncio.run(train(loaded)).root)


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    """A copy to change."""
    return RunDir(shutil.copytree(trained.root, tmp_path / "run"))


def digests(run: RunDir) -> list[str]:
    return [digest_of(read_manifest(run.checkpoint_path(step))) for step in run.checkpoint_steps()]


def test_turns_and_metrics_name_the_policy_of_their_step(trained: RunDir) -> None:
    wanted = digests(trained)
    assert len(set(wanted)) == 3 and all(len(digest) == 64 for digest in wanted)
    for step in (0, 1):
        assert {turn.policy for each in trained.trajectories(step) for turn in each.turns} == {wanted[step]}
    lines = {(line.split, line.step): line.policy for line in trained.metrics()}
    assert [lines["train", step] for step in (0, 1)] == wanted[1:]
    assert [lines["eval", step] for step in (0, 1, 2)] == wanted


def test_a_digest_depends_on_all_that_makes_a_reply_and_on_nothing_else() -> None:
    origin = Origin(base="b", template="t", dtype="float32")
    files = {"adapter_model.safetensors": "1", "optimizer.safetensors": "2", "README.md": "3"}
    digest = policy_digest(origin, files)
    assert digest == policy_digest(origin, {**files, "optimizer.safetensors": "9", "README.md": "9"})
    others = [
        policy_digest(origin, {**files, "adapter_model.safetensors": "9"}),
        *(policy_digest(msgspec.structs.replace(origin, **{name: "9"}), files) for name in origin.__struct_fields__),
    ]
    assert len({digest, *others}) == 6


async def test_a_reply_and_a_stream_of_art_serve_name_their_weights(trained: RunDir) -> None:
    wanted = digests(trained)[1]
    source = find_source(str(trained.checkpoint_path(1)))
    async with serving(source) as (_, root), httpx.AsyncClient(base_url=root, timeout=60) as http:
        body = {**BODY, "model": source.name}
        reply = await http.post("/v1/chat/completions", json=body)
        stream = await http.post("/v1/chat/completions", json={**body, "stream": True})
        card = (await http.get(f"/v1/models/{source.name}")).json()
        [listed] = (await http.get("/v1/models")).json()["data"]
        [ready] = (await http.get("/ready")).json()["models"]
    assert reply.headers["x-art-policy"] == stream.headers["x-art-policy"] == wanted
    assert card["policy"] == listed["policy"] == ready["policy"] == wanted


async def test_a_digest_that_another_endpoint_names_is_not_handed_on(trained: RunDir) -> None:
    """M2: it is the endpoint's own word, and nothing here proves it."""
    source = find_source(str(trained.checkpoint_path(1)))
    async with serving(source) as (_, root):
        backend = HttpBackend(f"{root}/v1", "none", source.name)
        asked = Request(model=source.name, messages=BODY["messages"], sampling=Sampling(max_tokens=4))
        read = [(await backend.reply(asked)).policy, *{chunk.policy async for chunk in backend.stream(asked)}]
        await backend.close()
    assert read == ["", ""]


async def test_a_model_that_no_learner_proved_is_served_without_a_digest(trained: RunDir) -> None:
    source = find_source(str(trained.base))
    async with serving(source) as (_, root), httpx.AsyncClient(base_url=root, timeout=60) as http:
        reply = await http.post("/v1/chat/completions", json={**BODY, "model": source.name})
        [listed] = (await http.get("/v1/models")).json()["data"]
    assert reply.status_code == 200
    assert "x-art-policy" not in reply.headers and "policy" not in listed


def resigned(run: RunDir, step: int) -> Path:
    """Writes the manifest of a changed checkpoint anew, so that its hashes fit, with the proof that it had."""
    path = run.checkpoint_path(step)
    manifest, aside = read_manifest(path), path.with_name("aside")
    path.rename(aside)
    with new_checkpoint(path, manifest) as new:
        shutil.copytree(aside, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    shutil.rmtree(aside)
    return path


async def refused(path: Path) -> ArtError:
    with pytest.raises(ArtError) as caught:
        async with serving(find_source(str(path))):
            pass
    return caught.value


async def test_the_adapter_of_an_earlier_step_does_not_answer(run: RunDir) -> None:
    shutil.copy(run.checkpoint_path(0) / "adapter_model.safetensors", run.checkpoint_path(2))
    error = await refused(resigned(run, 2))
    assert isinstance(error, DriftError) and "step 2" in str(error)


async def test_the_adapter_does_not_answer_on_another_base(run: RunDir) -> None:
    weights = load_weights(ModelConfig(base=str(run.base), lora=None), str(run.base))
    weights.model.get_input_embeddings().weight.data.mul_(1.05)
    (run.base / "hashes.json").unlink()
    save_weights(weights, run.base)
    assert isinstance(await refused(run.checkpoint_path(2)), DriftError)


async def test_a_chat_template_with_another_character_does_not_answer(run: RunDir) -> None:
    template = run.checkpoint_path(2) / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    error = await refused(resigned(run, 2))
    assert isinstance(error, CheckpointError) and "chat template" in str(error)


def test_a_digest_is_found_in_all_runs_also_that_of_a_pruned_checkpoint(
    art: Callable[..., tuple[int, str, str]], run: RunDir
) -> None:
    wanted = digests(run)[1]
    shutil.rmtree(run.checkpoint_path(1))
    command = ["checkpoints", str(run.root.parent), "--find", wanted[:12], "--json"]
    assert json.loads(art(*command)[1]) == [{"run": str(run.root), "step": 1}]
    code, _, err = art(*command[:-2], "0" * 64)
    assert code == 1 and "no run there" in err
    assert art(*command[:-2], "xyz")[0] == 2


# --- a change of weights ----------------------------------------------------------------------------------------------


async def test_a_reply_waits_for_the_proof_of_its_weights_and_fails_with_it() -> None:
    proven = ProvenSteps()
    proven.add(0, "old")
    async with proven.proving(1):
        waiting = asyncio.create_task(proven.digest(1))
        await asyncio.sleep(0.01)
        assert not waiting.done() and await proven.digest(0) == "old"
        proven.add(1, "new")
    assert await waiting == "new" == proven.newest
    with pytest.raises(DriftError):
        async with proven.proving(2):
            waiting = asyncio.create_task(proven.digest(2))
            await asyncio.sleep(0.01)
            raise DriftError("other weights")
    with pytest.raises(ChatError) as refusal:
        await waiting
    assert refusal.value.status == 503 and await proven.digest(1) == "new"


class Swapping(ScriptedEngine):
    """An engine that loads another adapter while it answers; of step 2 it scores what another policy would."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(lambda request: "ok", "mine", 1)
        self.run = run

    async def load(self, checkpoint: Path, step: int) -> None:
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids: list[int]) -> list[float]:
        probe = read_manifest(self.run.checkpoint_path(self.endpoint.step)).probe
        assert probe is not None
        return [value - (self.endpoint.step == 2) for value in probe.logprobs]


async def test_an_engine_that_swaps_gets_the_old_adapter_back_if_the_new_one_is_not_proven(trained: RunDir) -> None:
    class Loader(ScriptedLoader):
        swaps_adapters = True

        async def make(self, source: Source) -> ScriptedEngine:
            self.engines.append(Swapping(trained))
            return self.engines[-1]

    loader = Loader()
    old, new, first = (find_source(f"mine={trained.checkpoint_path(step)}") for step in (1, 2, 0))
    policy = ServedPolicy(old, loader)  # type: ignore[arg-type]
    await policy.start()
    with pytest.raises(DriftError):
        await policy.change(new)
    assert loader.engines[0].endpoint.step == policy.source.step == 1
    with pytest.raises(ChatError):
        await policy.proven.digest(2)
    assert await policy.proven.digest(1) == policy.proven.newest == digests(trained)[1]
    await policy.change(first)
    assert policy.proven.newest == digests(trained)[0] and loader.engines[0].endpoint.step == 0
    await policy.close()
