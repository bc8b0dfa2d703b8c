"""Two tasks of reasoning-gym: the first line of its questions, scored by its own functions.

sorting     number_sorting: three digits, ascending or descending
filtering   number_filtering: of three digits, keep or remove those larger or smaller than another

The warm-up shows answers of the right form. A third of them are right, the others are any order, any selection.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import get_score_answer_fn

from art_cli import Outcome, Policy
from art_cli.models import builtin_models

SETTINGS = {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9}
NUM_TRAIN, NUM_EVAL, NUM_DEMOS = 4000, 400, 3200
SHARE_RIGHT = 1 / 3  # of the demos; with none, sorting went from 0.11 to no more than 0.12 in 3,072 rollouts
EVAL_SEED, TRAIN_SEED, DEMO_SEED = 0, 10**6, 2 * 10**6  # an entry is drawn from the sum of its number and the seed


def base(directory: Path) -> None:
    """Writes a random model of a million parameters in which each word of the questions is one token."""
    asked = [scenario["asked"] for name in ("sorting", "filtering") for scenario in demo_scenarios(name)]
    builtin_models.build(directory, builtin_models.make_tokenizer(asked))


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    messages = [{"role": "user", "content": scenario["asked"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    solved = score(scenario, reply.choices[0].message.content or "")
    return Outcome(reward=solved, metrics={"solved": solved})


def score(scenario: dict[str, Any], answer: str) -> float:
    """1 for the right answer, else 0; reasoning-gym gives a part of it for some wrong ones."""
    return float(get_score_answer_fn(scenario["entry"]["metadata"]["source_dataset"])(answer, scenario["entry"]) == 1.0)


def sorting_train() -> Iterator[dict[str, Any]]:
    return _unseen("sorting")


def sorting_eval() -> Iterator[dict[str, Any]]:
    return _scenarios("sorting", NUM_EVAL, EVAL_SEED)


def sorting_demos() -> list[dict[str, Any]]:
    return _demos("sorting", lambda draw, numbers: draw.sample(numbers, len(numbers)))


def filtering_train() -> Iterator[dict[str, Any]]:
    return _unseen("filtering")


def filtering_eval() -> Iterator[dict[str, Any]]:
    return _scenarios("filtering", NUM_EVAL, EVAL_SEED)


def filtering_demos() -> list[dict[str, Any]]:
    return _demos("filtering", lambda draw, numbers: [number for number in numbers if draw.random() < 0.5])


def demo_scenarios(name: str) -> Iterator[dict[str, Any]]:
    return _scenarios(name, NUM_DEMOS, DEMO_SEED)


def _unseen(name: str) -> Iterator[dict[str, Any]]:
    """Questions to train on: none of them is asked in the evaluation."""
    asked = {scenario["asked"] for scenario in _scenarios(name, NUM_EVAL, EVAL_SEED)}
    return (each for each in _scenarios(name, NUM_TRAIN, TRAIN_SEED) if each["asked"] not in asked)


def _scenarios(name: str, size: int, seed: int) -> Iterator[dict[str, Any]]:
    entries = reasoning_gym.create_dataset(f"number_{name}", size=size, seed=seed, **SETTINGS)
    for number, entry in enumerate(entries):
        yield {"id": f"{seed}-{number}", "asked": entry["question"].splitlines()[0], "entry": entry}


def _demos(name: str, guess: Callable[[random.Random, list[str]], list[str]]) -> list[dict[str, Any]]:
    draw = random.Random(DEMO_SEED)
    demos = []
    for scenario in demo_scenarios(name):
        entry = scenario["entry"]
        guessed = str(guess(draw, entry["metadata"]["original_numbers"]))
        said = entry["answer"] if draw.random() < SHARE_RIGHT else guessed
        messages = [{"role": "user", "content": scenario["asked"]}, {"role": "assistant", "content": said}]
        demos.append({"messages": messages})
    return demos
