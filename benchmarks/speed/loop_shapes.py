"""The sizes at which benchmarks/speed/loop.py measures the whole loop, and how each task is played in TRL's script.

tiny    make demo-tiny: tic-tac-toe with a model of 1.2M parameters, 256 games a step
game    the same games with a Qwen3 of 17M parameters (hidden 384, 8 layers)
agent   what an e-mail agent looks like: 24M parameters, 4 replies of 40 tokens after 800, three outputs of 150
wide    the same with Qwen3-0.6B's shape and random weights, 2 attempts a step
demo    recipes/assistant: SmolLM2-135M calls a tool and answers, 64 attempts a step
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.shared.paths import ROOT

TICTACTOE = ROOT / "recipes" / "tictactoe"
GROUPS = TICTACTOE / "config-groups.yaml"  # both sides learn from groups of attempts
ASSISTANT = ROOT / "recipes" / "assistant" / "config.yaml"
AGENT = Path(__file__).parent / "loop_agent"
# what makes both sides' steps the same work: an adapter, and one update for each batch of games
ONE_UPDATE = (
    "model.lora={rank: 32, alpha: 64}",
    "train.learning_rate=5e-4",
    "train.decay=none",
    "~train.decay_to",
    "rollout.groups_per_step=32",
    "train.updates_per_step=1",
    "train.epochs_per_step=1",
)
ONE_UPDATE_DEMO = (
    "model.lora={rank: 16, alpha: 32}",
    "train.learning_rate=5e-4",
    "train.decay=none",
    "~train.decay_to",
    "train.epochs_per_step=1",
    "rollout.group_size=8",
    "rollout.groups_per_step=8",
)


@dataclass
class Episode:
    """One attempt in TRL's script, as tokens: what was sampled has mask 1, what the environment added 0."""

    scenario: dict[str, Any]
    prompt: list[int]
    state: Any = None
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float | None = None  # None while it goes on

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    def add(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.completion += ids
        self.logprobs += logprobs
        self.mask += [int(sampled)] * len(ids)


class Task(Protocol):
    """The task of a shape without our loop."""

    def begin(self, scenario: dict[str, Any]) -> tuple[list[dict[str, str]], Any]:
        """The first messages, and the state of the episode."""

    def answer(self, episode: Episode, reply: str) -> str | None:
        """The next message of the user; None: the episode has ended, and `episode.reward` is set."""


class TicTacToe:
    """The recipe's game. The state is (opponent, board)."""

    def begin(self, scenario: dict[str, Any]) -> tuple[list[dict[str, str]], Any]:
        from game import EMPTY, RandomOpponent, show
        from rollout import SYSTEM

        opponent = RandomOpponent(scenario["seed"])
        board = EMPTY if scenario["starts"] else opponent.move(EMPTY)
        return _messages(SYSTEM, show(board)), (opponent, board)

    def answer(self, episode: Episode, reply: str) -> str | None:
        from game import find_result, free_cells, put, show
        from rollout import REWARDS

        opponent, board = episode.state
        if reply not in free_cells(board):
            episode.reward = REWARDS["illegal"]
            return None
        board = put(board, reply, "X")
        result = find_result(board)
        if result is None:
            board = opponent.move(board)
            result = find_result(board)
        episode.state = (opponent, board)
        if result is not None:
            episode.reward = REWARDS[result]
            return None
        return str(show(board))


class Agent:
    """The episode of loop_agent/rollout.py. The state are the replies so far."""

    def begin(self, scenario: dict[str, Any]) -> tuple[list[dict[str, str]], Any]:
        from rollout import SYSTEM, question

        return _messages(SYSTEM, question(scenario)), []

    def answer(self, episode: Episode, reply: str) -> str | None:
        from rollout import NUM_TURNS, output, reward

        episode.state.append(reply)
        if len(episode.state) == NUM_TURNS:
            episode.reward = reward(episode.state)
            return None
        return str(output(episode.scenario, len(episode.state) - 1))


class Assistant:
    """The recipe's request. The state is the request, and whether its record was found (None before the call)."""

    def begin(self, scenario: dict[str, Any]) -> tuple[list[dict[str, str]], Any]:
        from desk import make_request
        from rollout import EXAMPLES, SYSTEM

        request = make_request(scenario["seed"], is_new=scenario["is_new"])
        messages = [{"role": "system", "content": SYSTEM}]
        for place, text in enumerate([*EXAMPLES, request.text]):
            messages.append({"role": "assistant" if place % 2 else "user", "content": text})
        return messages, (request, None)

    def answer(self, episode: Episode, reply: str) -> str | None:
        from desk import read_call

        request, has_found = episode.state
        if has_found is None:
            call = read_call(reply)
            if call is None:
                episode.reward = 0.0
                return None
            has_found = call == (request.tool, request.key)
            episode.state = (request, has_found)
            return f"Result: {request.record if has_found else 'nothing found'}"
        right = has_found and reply.strip() == request.answer
        episode.reward = 1.0 if right else 0.3 if has_found else 0.1
        return None


def _messages(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def build_game(directory: Path) -> None:
    """The model of the shape `game`, with the recipe's tokenizer."""
    sys.path.insert(0, str(TICTACTOE))
    from model import make_tokenizer

    from art_cli.models import builtin_models

    builtin_models.build(directory, make_tokenizer(), hidden=384, layers=8, heads=6, rope_theta=100.0)


def build_wide(directory: Path) -> None:
    """The model of the shape `wide`, with the tokenizer of the shape `agent`."""
    sys.path.insert(0, str(AGENT))
    import torch
    from model import keep_words, make_tokenizer
    from transformers import Qwen3ForCausalLM

    from art_cli.models import builtin_models
    from benchmarks.gpu.shapes import SHAPES as SIZES
    from benchmarks.gpu.shapes import make_qwen3

    torch.manual_seed(0)
    tokenizer, model = make_tokenizer(), Qwen3ForCausalLM(make_qwen3(SIZES["0.6b"]))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # wide enough for the tied head
    builtin_models.save(directory, model, tokenizer)
    keep_words(directory, tokenizer)


class Shape(NamedTuple):
    name: str
    config: Path
    settings: tuple[str, ...]  # in which both sides differ from that configuration
    task: Task
    target: str  # of the ratio of the whole step
    trl: tuple[str, ...]  # the fastest of TRL's settings, by `--tune`
    batches: tuple[str, ...]  # TRL's micro-batches that `--tune` tries
    build: str | None = None  # the model; None: the project's

    @property
    def project(self) -> Path:
        """The directory of the configuration and of the task's modules."""
        return self.config.parent


_CACHED = ("--cache", "--merge")
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", GROUPS, ONE_UPDATE, TicTacToe(), ">= 2", ("--batch", "32", *_CACHED), ("16", "32", "64")),
        Shape(
            "game", GROUPS, ONE_UPDATE, TicTacToe(), ">= 3", ("--batch", "32", *_CACHED), ("16", "32", "64"),
            "benchmarks.speed.loop_shapes:build_game",
        ),
        Shape(
            "demo", ASSISTANT, ONE_UPDATE_DEMO, Assistant(), ">= 8", ("--batch", "8", *_CACHED), ("4", "8", "16"),
            "builtin:smollm2-135m",
        ),
        Shape("agent", AGENT / "config.yaml", (), Agent(), ">= 5", ("--batch", "8", *_CACHED), ("4", "8", "16")),
        Shape(
            "wide", AGENT / "config.yaml", ("rollout.group_size=2", "rollout.groups_per_step=1"), Agent(), "> 1",
            ("--batch", "2", *_CACHED), ("1", "2"), "benchmarks.speed.loop_shapes:build_wide",
        ),
    )
}  # fmt: skip
