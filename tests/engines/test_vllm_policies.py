"""Several policies in one vLLM server: choice of adapter, and recovery from the server's death. A fake server
whose distributions depend on the adapter's bytes (fake_vllm.py); tests/tinker/test_vllm_backend.py has the real one.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.engines.vllm.vllm_policies import VllmPolicies
from art_cli.runs.manifest import Probe
from art_cli.runtime.errors import CheckpointError, DriftError, EngineError
from tests.engines.test_vllm import MODEL, PROBE, Fake
from tests.support.standins import fake_vllm


def probe(adapter: Path | None) -> Probe:
    seed = fake_vllm.seed_of(adapter)
    pairs = zip(PROBE, PROBE[1:], strict=False)
    return Probe(tokens=PROBE, logprobs=[fake_vllm.logprobs(seed, before)[after] for before, after in pairs])


def asking(temperature: float = 1.0) -> Request:
    return Request(model="policy", prompt=[7, 3], sampling=Sampling(temperature=temperature, max_tokens=4, seed=1))


def own(adapter: Path | None, ids: list[int]) -> list[float]:
    """What the fake says to those tokens after the prompt [7, 3]."""
    seed = fake_vllm.seed_of(adapter)
    return [fake_vllm.logprobs(seed, before)[after] for before, after in zip([3, *ids], ids, strict=False)]


async def test_policies_answer_beside_each_other_also_after_the_server_was_killed(tmp_path: Path) -> None:
    """Requests in flight when it dies are answered by the new server. When that dies too, everyone is told."""
    fake = Fake(tmp_path)
    paths = [fake.adapter("a"), fake.adapter("b"), None]
    server = VllmPolicies(fake.config(), MODEL, logs=fake.logs)
    await server.start()
    try:
        policies = [await server.open(path, probe(path)) for path in paths]
        for temperature in (1.0, 0.5):
            replies = await asyncio.gather(*(policy.reply(asking(temperature)) for policy in policies))
            for reply, path in zip(replies, paths, strict=True):
                (choice,) = reply.choices
                assert choice.raw_logprobs == pytest.approx(own(path, choice.token_ids))
        os.kill(server.pid, signal.SIGKILL)
        replies = await asyncio.gather(*(policy.reply(asking()) for policy in policies))
        for reply, path in zip(replies, paths, strict=True):
            assert reply.choices[0].raw_logprobs == pytest.approx(own(path, reply.choices[0].token_ids))
        await policies[0].close()
        names = [call["body"]["lora_name"] for call in fake.calls() if call.get("path") == "/v1/load_lora_adapter"]
        gone = [call["body"]["lora_name"] for call in fake.calls() if call.get("path") == "/v1/unload_lora_adapter"]
        assert len(names) == len(set(names)) == 4 and len(gone) == 1 and gone[0] in names[2:]
        watching = asyncio.ensure_future(server.watch())
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the server ended"):
            await asyncio.wait_for(watching, 20)
        with pytest.raises(EngineError, match="the server ended"):
            await policies[1].reply(asking())
    finally:
        await server.close()


async def test_a_policy_that_is_not_what_it_should_be_is_not_opened(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    server = VllmPolicies(fake.config(), MODEL, logs=fake.logs)
    await server.start()
    try:
        with pytest.raises(DriftError, match="does not sample from the learner's weights"):
            await server.open(fake.adapter("a"), probe(fake.adapter("b")))
        assert "/v1/unload_lora_adapter" in fake.paths()
        with pytest.raises(CheckpointError, match="not a LoRA adapter"):
            await server.open(tmp_path, probe(None))
    finally:
        await server.close()
