"""One loop, to be read from top to bottom: what `art train` does in each step, at the size of one page.

    python examples/one_loop.py            # under a minute on one core; prints the mean reward of each step

A language model with random weights is asked to say something. Its reward is the share of ASCII letters in what it
says, which it learns to raise from 0.4 to 0.9 within ten steps. The stages are those of docs/how-it-works.md:

    roll_out      scenario  -> group       several attempts at one scenario, each with the tokens that were sampled
    judge         group     -> rewards     one number per attempt (RULER would stand here)
    advantages    rewards   -> credit      each reward, relative to those of its group
    make_packs    credit    -> packs       rows of tokens in which whatever the attempts share stands once
    update        packs     -> weights     the gradient of GRPO's loss, and one step of AdamW

Dimensions in names: G attempts of a group, N trained tokens of a pack. What the product adds around these stages
(the gateway, engines, resuming, checks) is left out.
"""

import tempfile
from pathlib import Path

import torch

from art_cli import ScoredTrajectory, Trajectory, Turn
from art_cli.config.schema import LoraConfig, ModelConfig, TorchLearnerConfig
from art_cli.learners.algorithms import advantages, clip_tokens
from art_cli.learners.algorithms.objectives import PolicyTerms
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack, pack_samples
from art_cli.learners.samples import Row, token_weights, trajectory_samples
from art_cli.models.builtin_models import build, make_tokenizer
from art_cli.models.loading import load_weights
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import score_trajectory

SCENARIOS = [{"id": f"letters-{number}", "ask": f"say {number} letters"} for number in range(3)]
GROUP_SIZE = 16  # attempts at each scenario in each step
MAX_TOKENS = 8  # length limit of a reply
LEARNING_RATE = 1e-2  # of the adapter; that of a trained language model takes about 2e-4
CLIP = 0.2  # bound on how far one step may move the probability of a token


def make_policy(seed: int = 0) -> Weights:
    """Returns a random model of about 150,000 parameters with a LoRA adapter, which alone is trained.

    A real run names a model instead: `model: {base: Qwen/Qwen3-0.6B}`.
    """
    lora = LoraConfig(rank=8, alpha=16)
    with tempfile.TemporaryDirectory() as directory:
        build(Path(directory), make_tokenizer(scenario["ask"] for scenario in SCENARIOS), hidden=64, layers=2)
        weights = load_weights(ModelConfig(base=directory, lora=lora), directory, device="cpu", seed=seed)
    weights.model.get_input_embeddings().weight.data.mul_(0.3)  # else a random model repeats its last token for ever
    return weights


@torch.no_grad()
def roll_out(policy: Weights, scenario: dict[str, str], step: int, noise: torch.Generator) -> list[Trajectory]:
    """Returns a group: GROUP_SIZE attempts at the scenario, one turn each.

    The token ids and logprobs are kept as they were sampled. Text that is tokenized again may give other ids, and then
    the gradient would be that of a reply which nobody sampled. In a conversation the next turn has `parent=0` and adds
    only its own tokens, so that a trajectory is a prefix tree.
    """
    tokenizer = policy.tokenizer
    messages = [{"role": "user", "content": scenario["ask"]}]
    prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids_G = torch.tensor([prompt] * GROUP_SIZE)  # [G, L]
    chosen_G = []  # logprobs [G] of each token
    for _ in range(MAX_TOKENS):
        logprobs_G = policy.model(ids_G).logits[:, -1].log_softmax(-1)  # [G, V]
        next_G = torch.multinomial(logprobs_G.exp(), 1, generator=noise)  # [G, 1]
        chosen_G.append(logprobs_G.gather(1, next_G))
        ids_G = torch.cat([ids_G, next_G], dim=1)
    group = []
    for index, (ids, logprobs) in enumerate(zip(ids_G.tolist(), torch.cat(chosen_G, 1).tolist(), strict=True)):
        sampled = ids[len(prompt) :]
        if tokenizer.eos_token_id in sampled:  # a reply ends with its first stop token, which is trained too
            sampled = sampled[: sampled.index(tokenizer.eos_token_id) + 1]
        turn = Turn(
            parent=None,
            kept=0,
            prompt_ids=prompt,
            sampled_ids=sampled,
            logprobs=logprobs[: len(sampled)],
            raw_logprobs=logprobs[: len(sampled)],
            step=step,
            temperature=1.0,
        )
        reply = {"role": "assistant", "content": tokenizer.decode(sampled, skip_special_tokens=True)}
        group.append(
            Trajectory(
                id=f"{step}-{scenario['id']}-{index}",
                group_id=f"{step}-{scenario['id']}",
                group_size=GROUP_SIZE,
                index=index,
                scenario=dict(scenario),
                messages=[*messages, reply],
                turns=[turn],
            )
        )
    return group


def judge(group: list[Trajectory]) -> list[ScoredTrajectory]:
    """Returns the attempts with their rewards: the share of ASCII letters in the reply; 0 for an empty one.

    Where no rule gives the reward, a language model compares the attempts of the group. That is RULER, and the whole
    body would be `return asyncio.run(art_cli.ruler_score_group(group))`.
    """
    replies = [trajectory.messages[-1]["content"] for trajectory in group]
    letters = [sum(letter.isascii() and letter.isalpha() for letter in reply) for reply in replies]
    rewards = [num / max(len(reply), 1) for num, reply in zip(letters, replies, strict=True)]
    return [score_trajectory(trajectory, reward) for trajectory, reward in zip(group, rewards, strict=True)]


def make_packs(groups: list[list[ScoredTrajectory]]) -> list[Pack]:
    """Returns the step's attempts as packs, in which each sampled token has its attempt's advantage as weight.

    The advantage is (reward - mean) / standard deviation within the group: only attempts at the same scenario are
    compared, so that an easy scenario is no merit. Equal rewards give zeros, and nothing is learned from that group.
    All attempts of a group begin with the same prompt, which is computed once per pack.
    """
    samples = []
    for group in groups:
        advantages_G = advantages([trajectory.reward or 0.0 for trajectory in group], scale=True)
        for trajectory, advantage in zip(group, advantages_G, strict=True):
            samples += trajectory_samples(trajectory, token_weights(trajectory, advantage))
    return pack_samples(samples, budget=1024)


def update(packs: list[Pack], runner: PackRunner, optimizer: torch.optim.Optimizer) -> None:
    """Takes one step of AdamW on GRPO's clipped loss, a mean over all trained tokens of the step.

    The ratio new / old compares the probability of each token now with that at which it was sampled. It is 1 in the
    first update after sampling; the clip matters where one batch is used for several updates.
    """
    num_tokens = sum(len(pack.terms.edges) for pack in packs)
    with runner.running():  # the model's layers attend to the pack's prefix tree
        for pack in packs:  # the loss is a sum over packs, so that only one pack is in memory at a time
            new = runner.run(pack).logprobs[torch.from_numpy(pack.terms.edges)]  # [N]
            old = torch.from_numpy(pack.terms.logprobs).float()  # [N] the sampler's
            weights = torch.from_numpy(pack.terms.weights[Row.POLICY]).float()  # [N] advantages
            terms = PolicyTerms(new, old, weights, torch.from_numpy(pack.terms.samples))
            (clip_tokens(terms, CLIP, CLIP).values.sum() / num_tokens).backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(num_steps: int = 15) -> list[float]:
    """Trains for that many steps and returns the mean reward of each."""
    torch.set_num_threads(1)  # a model this small is not faster on more cores
    policy = make_policy()
    runner = PackRunner(policy, TorchLearnerConfig())
    runner.decide(can_pack=True, reason="")  # `art train` compares packed and plain logprobs first
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    noise = torch.Generator().manual_seed(0)
    means = []
    for step in range(num_steps):
        groups = [judge(roll_out(policy, scenario, step, noise)) for scenario in SCENARIOS]
        update(make_packs(groups), runner, optimizer)
        rewards = [trajectory.reward or 0.0 for group in groups for trajectory in group]
        means.append(sum(rewards) / len(rewards))
        print(f"step {step:3d}  reward {means[-1]:.3f}  {groups[0][0].messages[-1]['content']!r}")
    return means


if __name__ == "__main__":
    main()
