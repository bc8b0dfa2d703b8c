"""The episodes of one step of a shape (benchmarks/speed/loop_shapes.py), played by a seeded random policy.

The task is the shape's own, so prompts, turns and shared tokens are those of its rollouts. Tic-tac-toe is played with
random legal moves, which is what its policy has learned before its first step. An agent's reply is 40 random tokens.
"""

import random
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

from art_cli.runs.trajectory import ScoredTrajectory, Turn
from benchmarks.speed.loop_shapes import Agent, Episode, Shape
from benchmarks.step.batches import Groups, make_turn

Reply = Callable[[Episode], list[int]]


def play(shape: Shape, config: Any, tokenizer: Any) -> list[list[Episode]]:
    """One step's episodes, by group. The attempts of a group differ by their replies alone."""
    from art_cli.rollouts.scenario_files import load_scenarios

    sys.path.insert(0, str(shape.project))
    scenarios = load_scenarios(config.rollout.scenarios, shape.project)[: config.rollout.groups_per_step]
    draw = random.Random(0)
    choose = _random_words(config, draw, tokenizer) if isinstance(shape.task, Agent) else _random_move(draw, tokenizer)
    return [
        [_play(shape, scenario, tokenizer, choose) for _ in range(config.rollout.group_size)] for scenario in scenarios
    ]


def _random_move(draw: random.Random, tokenizer: Any) -> Reply:
    from game import free_cells

    end = tokenizer.eos_token_id

    def choose(episode: Episode) -> list[int]:
        _, board = episode.state
        return [*_ids(tokenizer, draw.choice(free_cells(board))), end]

    return choose


def _random_words(config: Any, draw: random.Random, tokenizer: Any) -> Reply:
    special = set(tokenizer.all_special_ids)
    words = [id for id in range(len(tokenizer)) if id not in special]
    return lambda episode: draw.choices(words, k=config.rollout.sampling.max_tokens)


def _play(shape: Shape, scenario: dict[str, Any], tokenizer: Any, choose: Reply) -> Episode:
    messages, state = shape.task.begin(scenario)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    episode = Episode(scenario, _ids(tokenizer, text), state)
    while episode.reward is None:
        ids = choose(episode)
        episode.add(ids, [0.0] * len(ids), sampled=True)
        said = shape.task.answer(episode, tokenizer.decode(ids, skip_special_tokens=True))
        if said is not None:
            end = "" if ids[-1] == tokenizer.eos_token_id else "<|im_end|>"
            added = _ids(tokenizer, f"{end}\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
            episode.add(added, [0.0] * len(added), sampled=False)
    return episode


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def as_groups(played: list[list[Episode]]) -> Groups:
    """The episodes as the learner is given them."""
    return [
        [
            ScoredTrajectory(
                id=f"g{number}/{index}",
                group_id=f"g{number}",
                group_size=len(group),
                index=index,
                turns=_turns(episode),
                reward=episode.reward,
            )
            for index, episode in enumerate(group)
        ]
        for number, group in enumerate(played)
    ]


def _turns(episode: Episode) -> list[Turn]:
    runs = [(sampled, [id for id, _ in run]) for sampled, run in groupby(_completion(episode), key=lambda one: one[1])]
    prompts = [episode.prompt, *(ids for sampled, ids in runs if not sampled)]
    replies = [ids for sampled, ids in runs if sampled]
    turns: list[Turn] = []
    length = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        turns.append(make_turn(prompt, reply, parent=len(turns) - 1 if turns else None, kept=length))
        length += len(prompt) + len(reply)
    return turns


def _completion(episode: Episode) -> list[tuple[int, int]]:
    return list(zip(episode.completion, episode.mask, strict=True))


def as_recorded(played: list[list[Episode]], advantages: list[list[float]]) -> dict[str, Any]:
    """What TRL's generation gives for the same episodes: prompts padded at the left, completions at the right."""
    import torch

    rows = [episode for group in played for episode in group]
    prompts, completions = ([getattr(row, name) for row in rows] for name in ("prompt", "completion"))
    masks = _padded([row.mask for row in rows], left=False)
    return {
        "prompt_ids": _padded(prompts, left=True),
        "prompt_mask": _padded([[1] * len(ids) for ids in prompts], left=True),
        "completion_ids": _padded(completions, left=False),
        "completion_mask": _padded([[1] * len(ids) for ids in completions], left=False),
        "tool_mask": masks,
        "advantages": torch.tensor([one for group in advantages for one in group]).float(),
        "num_items_in_batch": masks.sum(),
    }


def _padded(rows: list[list[int]], *, left: bool) -> Any:
    import torch

    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])
