"""Two replicas in a real vLLM server on the CPU: both load each step's adapter. `make test-vllm` sets it up."""

import asyncio
from pathlib import Path

import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import VllmEngineConfig
from art_cli.engines import proof
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.models.policy_spec import spec_of
from tests.support.models.letters_policy import LettersPolicy
from tests.support.others.real_vllm import MARKS, PYTHON, QUICK

pytestmark = MARKS


async def test_both_replicas_have_each_steps_adapter_and_answer(tmp_path: Path) -> None:
    """Each rank scores as PEFT does with that step's adapter; `score` itself raises if the two differ."""
    policy = LettersPolicy(tmp_path)
    settings = VllmEngineConfig.model_validate({"name": "vllm", "python": PYTHON, "replicas": 2, **QUICK})
    engine = VllmEngine(settings, spec_of(policy.weights), name="policy", logs=tmp_path)
    probe = proof.make_probe(265)
    await engine.start()
    try:
        for step, name in enumerate("ab", 1):
            await engine.load(policy.checkpoints[name], step)
            policy.take(name)
            assert await engine.score(probe) == pytest.approx(policy.score(probe), abs=1e-4)
            messages = [{"role": "user", "content": "red"}]
            request = Request(model="policy", messages=messages, sampling=Sampling(max_tokens=8, seed=1))
            replies = await asyncio.gather(*(engine.reply(request) for _ in range(6)))
            assert {reply.step for reply in replies} == {step}
    finally:
        await engine.close()
