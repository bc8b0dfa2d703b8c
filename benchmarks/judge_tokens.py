"""Tokens a judge is sent for a group of 8 multi-turn attempts: the tree against the flat form.

    python -m benchmarks.judge_tokens

Flat: messages as JSON, each attempt's list whole but for the leading messages that all eight share, which are sent
once; the conversations of sub-agents and edited histories whole, one after the other. This is how OpenPipe ART 0.5.18
writes its prompt (it refuses attempts with several conversations; here they get the same flat form). Both forms are
counted whole, our longer instructions against one sentence, and the same rubric.

The three shapes are made by seed from the same words: an agent with four tools that looks things up, six turns of a few
sentences, tool outputs of 60 to 250 words.

    prompt only         eight attempts that share the system prompt and the task, and differ from the first turn on
      plain outputs     the same where tools answer in plain sentences, which JSON need not escape
    shared first turns  a search tree: two halves share two turns each, pairs in them two more
    sub-agents          each attempt calls two helpers with a system prompt of their own, and takes one turn back
"""

import contextlib
import functools
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tiktoken

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.ruler import prompt as prompt_module
from art_cli.judges.ruler import votes
from art_cli.judges.ruler.group import read_group
from art_cli.judges.ruler.prompt import read_instructions, write_prompt
from art_cli.runs.trajectory import Json, Trajectory

GROUP = 8
TURNS = 6
SEEDS = 5
LIMITS = {"prompt only": 1.02, "  plain outputs": 1.02, "shared first turns": 0.7, "sub-agents": 0.7}
TEXT = """
the flight from Oslo leaves early and arrives before noon while another one is cheaper but stops in Vienna so the
traveller asked whether bags are included and the policy says one piece of ten kilograms is free for members who
book online at least two days ahead of departure otherwise a fee of thirty euros applies per bag and direction
"""
FLAT_INSTRUCTIONS = "Score each attempt at the goal below between 0 and 1, by these standards:\n"  # and our own rubric


class Writer:
    """Makes text by seed: sentences, tool outputs, turns."""

    def __init__(self, seed: int, *, is_plain: bool = False) -> None:
        self.rng, self.is_plain, self.words = random.Random(seed), is_plain, TEXT.split()

    def sentence(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(self.words, k=self.rng.randint(low, high))).capitalize() + "."

    def output(self) -> str:
        """A tool's answer: rows of text and numbers as JSON, or one line of sentences."""
        if self.is_plain:
            return " ".join(self.sentence(8, 30) for _ in range(self.rng.randint(3, 8)))
        rows = [{"id": self.rng.randrange(10**6), "note": self.sentence(8, 30)} for _ in range(self.rng.randint(3, 8))]
        return json.dumps({"results": rows}, indent=1)

    def turn(self) -> list[Json]:
        """What the agent says and calls, and the tool's answer."""
        name = f"call_{self.rng.randrange(16**24):024x}"
        arguments = json.dumps({"query": self.sentence(3, 8), "limit": self.rng.randint(1, 20)})
        function = {
            "name": self.rng.choice(["search_flights", "read_policy", "book", "ask_traveller"]),
            "arguments": arguments,
        }
        said = f"{self.sentence(10, 30)} {self.sentence(10, 30)}"
        return [
            {
                "role": "assistant",
                "content": said,
                "tool_calls": [{"id": name, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": name, "content": self.output()},
        ]

    def turns(self, count: int) -> list[Json]:
        return [message for _ in range(count) for message in self.turn()]

    def end(self) -> list[Json]:
        return [{"role": "assistant", "content": f"{self.sentence(20, 50)}\n\n{self.sentence(10, 30)}"}]

    def prompt(self) -> list[Json]:
        rules = "\n".join(f"{number}. {self.sentence(12, 30)}" for number in range(1, 9))
        return [
            {"role": "system", "content": f"You book flights.\n{rules}"},
            {"role": "user", "content": self.sentence(20, 40)},
        ]


def prompt_only(seed: int, *, is_plain: bool = False) -> list[Trajectory]:
    writer = Writer(seed, is_plain=is_plain)
    start = writer.prompt()
    return [_attempt(index, [*start, *writer.turns(TURNS), *writer.end()]) for index in range(GROUP)]


def plain_outputs(seed: int) -> list[Trajectory]:
    return prompt_only(seed, is_plain=True)


def shared_first_turns(seed: int) -> list[Trajectory]:
    """A search tree: all eight fork after the prompt in two halves, each half after 2 turns in pairs, those after 4."""
    writer = Writer(seed)
    start = writer.prompt()
    group: list[Trajectory] = []
    for _ in range(2):
        half = [*start, *writer.turns(2)]
        for _ in range(2):
            pair = [*half, *writer.turns(2)]
            for _ in range(2):
                group.append(_attempt(len(group), [*pair, *writer.turns(TURNS - 4), *writer.end()]))
    return group


def sub_agents(seed: int) -> list[Trajectory]:
    """Two helpers an attempt, who report into the main conversation, which is summed up and gone on from once."""
    writer = Writer(seed)
    start, helper_prompt = writer.prompt(), writer.prompt()
    group = []
    for index in range(GROUP):
        main, branches = [*start, *writer.turns(2)], []
        for _ in range(2):
            report = writer.end()
            branches.append([*helper_prompt, *writer.turns(2), *report])
            call, answer = writer.turn()
            main += [call, {**answer, "content": report[0]["content"]}]
        branches.append([*main, *writer.turns(1)])  # a way it went and then took back
        group.append(_attempt(index, [*main, *writer.turns(2), *writer.end()], branches))
    return group


def _attempt(index: int, messages: list[Json], branches: Sequence[list[Json]] = ()) -> Trajectory:
    return Trajectory(
        id=f"g-{index}", group_id="g", group_size=GROUP, index=index, messages=messages, branches=list(branches)
    )


def flat_prompt(group: Sequence[Trajectory]) -> str:
    """The flat form, instructions and all."""
    lists = [[message for branch in [*each.branches, each.messages] for message in branch] for each in group]
    shared = 0
    while all(len(messages) > shared and messages[shared] == lists[0][shared] for messages in lists):
        shared += 1
    parts = [f"<context>\n{json.dumps(lists[0][:shared])}\n</context>\n\nTrajectories:\n"]
    parts += [
        f'<trajectory id="{number}">\n{json.dumps(messages[shared:])}\n</trajectory>\n'
        for number, messages in enumerate(lists, 1)
    ]
    rubric = (Path(prompt_module.__file__).parent / "rubric.txt").read_text()
    return FLAT_INSTRUCTIONS + rubric + "\n".join(parts)


def tree_prompt(group: Sequence[Trajectory]) -> str:
    """What RULER sends, instructions and all; nothing cut."""
    config = RulerJudgeConfig(name="ruler", max_tokens_per_attempt=10**6)
    judged = read_group(group, config)
    order = votes.order(len(judged.attempts), seed=judged.seed, vote=0)
    told = read_instructions(config, Path("."))
    prompt = write_prompt(judged.attempts, order=order, tools=judged.tools, instructions=told, seed="0")
    return "\n".join(message["content"] for message in prompt.messages)


def make_counter() -> tuple[str, Callable[[str], int]]:
    """A tokenizer's name and its count; litellm brings the files along, so that no network is needed."""
    spec = importlib.util.find_spec("litellm")
    assert spec and spec.submodule_search_locations
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", f"{spec.submodule_search_locations[0]}/litellm_core_utils/tokenizers")
    for name in ("o200k_base", "cl100k_base"):
        with contextlib.suppress(Exception):  # not in the directory, and no network to fetch it
            return name, functools.partial(_count, tiktoken.get_encoding(name))
    raise SystemExit("no tokenizer is to be had")


def _count(encoding: tiktoken.Encoding, text: str) -> int:
    return len(encoding.encode(text, disallowed_special=()))


def main() -> None:
    name, count = make_counter()
    out = sys.stdout.write
    out(f"Tokens sent for a group of {GROUP} attempts, mean of {SEEDS} seeds, counted with {name}\n")
    out(f"{'shape':20s} {'flat':>8s} {'tree':>8s} {'ratio':>7s} {'limit':>7s}\n")
    missed = []
    for shape, make in zip(LIMITS, (prompt_only, plain_outputs, shared_first_turns, sub_agents), strict=True):
        groups = [make(seed) for seed in range(SEEDS)]
        flat, tree = (sum(count(form(group)) for group in groups) / SEEDS for form in (flat_prompt, tree_prompt))
        out(f"{shape:20s} {flat:8.0f} {tree:8.0f} {tree / flat:7.3f} {LIMITS[shape]:7.2f}\n")
        if tree / flat > LIMITS[shape]:
            missed.append(shape.strip())
    if missed:
        raise SystemExit(f"above the limit: {', '.join(missed)}")


if __name__ == "__main__":
    main()
