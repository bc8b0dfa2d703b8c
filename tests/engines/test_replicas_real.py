"""Two real vLLM servers on the CPU as one engine, and one of them killed while calls are in flight.

`make test-vllm` sets it up.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import VllmEngineConfig
from art_cli.engines import proof
from art_cli.engines.vllm.replicas import VllmReplicas
from art_cli.models.policy_spec import spec_of
from tests.support.letters_policy import LettersPolicy
from tests.support.real_vllm import MARKS, PYTHON, QUICK
from tests.support.waiting import until

CALLERS, TOKENS = 6, 48  # number of callers at once; number of tokens of each reply
START_S = 240.0  # longest wait for a server to answer again, on a machine that does other things too

pytestmark = MARKS


class Callers:
    """CALLERS clients that call one after the other, each for a group of its own, until they are told to stop."""

    def __init__(self, engine: VllmReplicas) -> None:
        self.replies: list[Reply] = []
        self._engine, self._is_over = engine, False
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(CALLERS)]

    async def _call(self, number: int) -> None:
        while not self._is_over:
            sampling = Sampling(max_tokens=TOKENS, seed=len(self.replies))
            messages = [{"role": "user", "content": f"group {number}"}]
            request = Request(model="policy", messages=messages, sampling=sampling, group=f"g{number}")
            self.replies.append(await self._engine.reply(request))

    async def stop(self) -> None:
        """Raises what a call raised."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def test_no_call_is_lost_when_a_server_is_killed_and_it_returns_with_the_newest_adapter(tmp_path: Path) -> None:
    """Step 2 is loaded while the killed server is away. Afterwards it scores as PEFT does with that step's adapter."""
    policy = LettersPolicy(tmp_path)
    settings = VllmEngineConfig.model_validate({"name": "vllm", "python": PYTHON, "replicas": 2, **QUICK})
    engine = VllmReplicas(settings, spec_of(policy.weights), name="policy", logs=tmp_path)
    probe = proof.make_probe(265)
    await engine.start()
    try:
        await engine.load(policy.checkpoints["a"], 1)
        callers, victim = Callers(engine), engine.replicas[1]
        await until(lambda: len(callers.replies) >= CALLERS and victim.num_requests >= 2)
        num_before = len(callers.replies)
        os.kill(victim.engine.pid, signal.SIGKILL)
        await until(lambda: not victim.can_answer)
        await engine.load(policy.checkpoints["b"], 2)
        policy.take("b")
        assert await engine.score(probe) == pytest.approx(policy.score(probe), abs=1e-4)
        assert not victim.can_answer, "it was back before the second step was loaded"
        await until(lambda: victim.can_answer, START_S)
        await callers.stop()
        assert engine.num_moved >= 2 and victim.engine.num_ends == 1
        assert len(callers.replies) > num_before + CALLERS
        assert {reply.step for reply in callers.replies} == {1, 2}
        assert all(len(reply.choices[0].token_ids) <= TOKENS for reply in callers.replies)
        assert await victim.engine.score(probe) == pytest.approx(policy.score(probe), abs=1e-4)
        request = Request(model="policy", messages=[{"role": "user", "content": "red"}], sampling=Sampling(seed=1))
        assert (await victim.engine.reply(request)).step == 2
    finally:
        await engine.close()
