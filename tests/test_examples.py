"""The loops in examples/ learn their tasks."""

import asyncio
import itertools
import json
import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runtime.plugins import resolve
from tests.support.paths import ROOT
from tests.support.standins.scripted import Engine, ScriptedBackend


def example(name: str) -> Any:
    spec = spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_teaching_loop_learns_the_letters_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Chance is a share of letters of 0.38; after eight updates at least three letters in four characters."""
    rewards = example("one_loop").main(num_steps=9)
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.75


@pytest.mark.slow
def test_the_agents_loop_learns_what_its_judge_rewards(tmp_path: Path) -> None:
    """A random model calls no tool, so the judge rewards a letter of its first reply. Chance is 0.25.

    The gap is that between the engine's logprobs and the learner's, so each step was sampled from the newest policy.
    """
    loop = example("agent_loop")
    loop.LEARNING_RATE = 1e-3  # for a model this narrow
    policy = loop.make_policy("builtin:tiny", tmp_path)
    ruler = loop.make_judge("builtin:rule", 'rule: +1 if assistant 7 has "k"')
    result = asyncio.run(loop.train(policy, ruler, 8, num_groups=2, num_held_out=4))
    assert len(result.rewards) == len(result.gaps) == 8
    assert max(result.gaps) < 1e-4
    assert result.rewards[0] < 0.5
    assert result.rewards[-1] > 0.75
    assert result.before == result.after == 0.0, "no tool was called, so no answer is right"


async def test_a_group_of_the_agents_loop_is_played_with_tools_judged_and_packed() -> None:
    """Every second attempt looks the right record up. RULER's rules give 1 to those and 0.1 to the others, so their
    advantages are plus and minus 0.45 over the deviation of eight, 0.45 * sqrt(8 / 7). Only sampled tokens have one."""
    loop = example("agent_loop")
    scenario = next(iter(loop.scenarios()))
    request = resolve("desk.py:make_request", base=loop.RECIPE)(scenario["seed"], is_new=False)
    num_calls = itertools.count()

    def reply(asked: Request) -> str:
        found = str((asked.messages or [])[-1]["content"])
        if not found.startswith("Result: "):
            return json.dumps({request.tool: request.key if next(num_calls) % 2 else "nobody"})
        return request.answer

    gateway = Gateway(Engine(ScriptedBackend(reply), step=3), defaults=Sampling(), seed=0, max_turns=2)
    ruler = loop.make_judge("builtin:rule", (loop.RECIPE / "rubric.txt").read_text())
    async with gateway.serve():
        [played] = await loop.generate(gateway, [scenario])
    group = await loop.judge(ruler, played)
    await ruler.close()
    assert len(group) == loop.GROUP_SIZE
    assert [[turn.parent for turn in attempt.turns] for attempt in group] == [[None, 0]] * 8
    assert {(attempt.metrics["right"], round(attempt.reward, 6)) for attempt in group} == {(1.0, 1.0), (0.0, 0.1)}
    packs = loop.make_packs([group])
    weights = [weight for pack in packs for weight in pack.terms.weights[loop.Row.POLICY].tolist()]
    assert len(weights) == sum(attempt.num_sampled for attempt in group)
    assert sorted(set(weights)) == pytest.approx([-math.sqrt(7 / 8), math.sqrt(7 / 8)])
