"""textarena as an environment: the policy plays all seats and trains on one; each game has separate random numbers."""

import random
import re
from functools import partial
from pathlib import Path

import pytest

from art_cli.chat.requests import Request, text_of
from art_cli.rollouts.environments import EnvironmentFault, Settings, open_environment
from art_cli.rollouts.environments.textarena import TextGame, _Match
from art_cli.runs.trajectory import prompt, sequence
from art_cli.runtime.worker_pool import WorkerPool
from tests.rollouts.environments.test_reasoning_gym import played
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import ScriptedBackend


def last_said(request: Request) -> str:
    return text_of(request.messages[-1]["content"])


def bisect(request: Request) -> str:
    """A guess that halves the remaining range of 1 to 20."""
    low, high = 1, 20
    for guessed, heard in zip(request.messages[1::2], request.messages[2::2], strict=True):
        guess = int(text_of(guessed["content"]).strip("[]"))
        low, high = (guess + 1, high) if "higher" in text_of(heard["content"]) else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def first_free(request: Request) -> str:
    """The first free cell of tic-tac-toe: seat 0 wins in its fourth move, on 2, 4, and 6."""
    cells = re.findall(r"'\[(\d)\]'", last_said(request).rpartition("Available Moves")[2])
    return f"<think>[8]</think>[{cells[0]}]"


async def test_a_game_for_one_is_played_to_its_end(tmp_path: Path) -> None:
    """Halving 1 to 20 takes at most 5 guesses. The game's texts since the last guess are one message; no branches."""
    stage = Stage(tmp_path, ScriptedBackend(bisect))
    for attempt in await played(stage, "textarena/GuessTheNumber-v0", 1, 2, 3):
        assert (attempt.error, attempt.returned_reward, attempt.metrics["won"]) == (None, 1.0, 1.0)
        assert len(attempt.turns) == attempt.metrics["moves"] <= 5
        for index in range(1, len(attempt.turns)):
            before = sequence(attempt.turns, index - 1)
            assert prompt(attempt.turns, index)[: len(before)] == before


async def test_the_policy_plays_both_seats_and_each_seed_trains_one(tmp_path: Path) -> None:
    """Both seats call the policy, but only the trained seat's calls are recorded. Seat 0 wins, so seat 1 loses."""
    stage = Stage(tmp_path, ScriptedBackend(first_free))
    first, second = await played(stage, "textarena/TicTacToe-v0", 4, 5, max_turns=4)
    assert (first.error, first.returned_reward, first.metrics["moves"]) == (None, 1.0, 4)
    assert (second.error, second.returned_reward, second.metrics["moves"]) == (None, -1.0, 3)
    assert len(first.turns) == 4 and len(second.turns) == 3 and len(stage.backend.requests) == 14
    for attempt, seat in ((first, 0), (second, 1)):
        assert text_of(attempt.messages[0]["content"]).startswith(f"You are Player {seat}")
    seeds = [request.sampling.seed for request in stage.backend.requests]
    assert None not in seeds and len(set(seeds)) == 14


def test_games_at_once_draw_what_they_draw_alone() -> None:
    """Blackjack draws its cards from Python's global generator, when it begins and after moves."""
    game = open_environment(Settings("textarena/Blackjack-v0"))
    assert isinstance(game, TextGame)
    begin = partial(_Match, game._make, 1)
    moves = ["hit", "stand", "stand"]
    alone = []
    for seed in (1, 2):
        match = begin(seed)
        alone.append([match.look().said, *(match.move(move).said for move in moves)])
    before = random.getstate()
    both = [begin(1), begin(2)]
    together: list[list[str]] = [[match.look().said] for match in both]
    for move in moves:
        for match, said in zip(both, together, strict=True):
            said.append(match.move(move).said)
    assert together == alone and alone[0] != alone[1]
    assert random.getstate() == before


async def test_a_game_that_never_answers_is_a_failed_attempt() -> None:
    """With one player, PublicGoodsGame of textarena 0.7.4 searches forever for another active player."""
    game = open_environment(Settings("textarena/PublicGoodsGame-v0"))
    assert isinstance(game, TextGame) and game.num_players == 3
    match = _Match(game._make, 1, seed=0)
    game._workers = WorkerPool(size=1, wait_s=60.0, run_s=0.2)
    with pytest.raises(EnvironmentFault, match="it did not answer within"):
        for _ in range(9):
            await game._call(match.move, "[1 1]")
    assert (await game._call(match.look)).seat == 0  # the next call has a thread again
    match._env.state.elimination_order = None  # ends the abandoned call, by an error
