"""Tic-tac-toe with words: a judge that names better moves by rule, and demos from which a model learns to read them.

The words are one sign for each move of the attempt: the cell it should have taken (one that wins, else one that stops
O from winning), or "-" where nothing is to be said. Demos with words name some of the demo's own moves, so that a model
learns to play what the words say; nothing in the demos is good play.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from art_cli import Judge, Verdict
from art_cli.runs.trajectory import Score, Trajectory
from benchmarks.shared.paths import ROOT

sys.path.insert(0, str(ROOT / "recipes" / "tictactoe"))
from demos import games as plain_games
from game import find_result, free_cells, put, read

FEEDBACK = "\nbetter: {explanation}"
SAID = 0.5  # share of a demo's moves that its words name
NUM_GAMES = 25600  # of which a model of 0.4M parameters learns to make 0.9 of the moves named; of 3200 it learns none


class Words(Judge):
    """Reward: what the game was worth. Explanation: the better move at each of the attempt's boards."""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        return {each.id: self._verdict(each) for each in group}

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        reward, words = trajectory.returned_reward or 0.0, better_moves(trajectory.messages)
        return Verdict(reward=reward, scores=[Score(judge="rule", score=reward, explanation=words)])


def better_moves(messages: Sequence[Mapping[str, Any]]) -> str:
    """Example: "- 7 -" where the second move should have been 7."""
    pairs = zip(messages, messages[1:], strict=False)
    boards = [(asked["content"], said["content"]) for asked, said in pairs if said["role"] == "assistant"]
    return " ".join(_better(read(shown), move) for shown, move in boards)


def _better(board: str, move: str) -> str:
    for player in "XO":
        if cells := [cell for cell in free_cells(board) if find_result(put(board, cell, player)) == player]:
            return "-" if move in cells else cells[0]
    return "-" if move in free_cells(board) else free_cells(board)[0]


def games() -> list[dict[str, Any]]:
    """The recipe's demos, every second one with words."""
    draw = random.Random(1)
    return [_with_words(demo, draw) if number % 2 else demo for number, demo in enumerate(plain_games(NUM_GAMES))]


def _with_words(demo: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    system, first, *rest = demo["messages"]
    moves = [message["content"] for message in rest if message["role"] == "assistant"]
    words = " ".join(move if draw.random() < SAID else "-" for move in moves)
    told = {**first, "content": first["content"] + FEEDBACK.format(explanation=words)}
    return {"messages": [system, told, *rest]}
