"""The demo's parts: rules against known counts, demonstrations, prompts that go on token for token, a fixed model."""

import asyncio
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import TICTACTOE

sys.path.insert(0, str(TICTACTOE))

import demos  # noqa: E402
import game  # noqa: E402
import model  # noqa: E402
import rollout  # noqa: E402
import scenarios  # noqa: E402


def all_games(board: str, player: str) -> Iterator[str]:
    """The result of every game that can be played on from here."""
    result = game.find_result(board)
    if result is not None:
        yield result
        return
    for cell in game.free_cells(board):
        yield from all_games(game.put(board, cell, player), "O" if player == "X" else "X")


@pytest.mark.slow
def test_there_are_as_many_games_as_there_are() -> None:
    """255,168 games: 131,184 won by the first player, 77,904 by the second, 46,080 drawn (known counts)."""
    assert Counter(all_games(game.EMPTY, "X")) == {"X": 131184, "O": 77904, "draw": 46080}


def test_demonstrations_are_legal_and_no_move_is_preferred() -> None:
    """First moves on the empty board: 1,600 over nine cells, chi-square with 8 degrees below its 99.9 % point, 26.1."""
    shown = demos.games()
    first = Counter()
    for demo in shown:
        turns = demo["messages"][1:]
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            assert answered["content"] in game.free_cells(game.read(asked["content"]))
        if turns[0]["content"] == game.show(game.EMPTY):
            first[turns[1]["content"]] += 1
    expected = sum(first.values()) / 9
    assert sum(first.values()) == demos.NUM_GAMES / 2
    assert sum((first[cell] - expected) ** 2 / expected for cell in game.EMPTY) < 26.1


def test_every_turns_prompt_goes_on_from_the_tokens_before_it() -> None:
    """prompt of turn n, the sampled move and its end are a prefix of the prompt of turn n + 1, in tokens."""
    tokenizer = model.make_tokenizer()
    draw = random.Random(1)
    for demo in draw.sample(demos.games(), 50):
        before: list[int] = []
        for place, message in enumerate(demo["messages"]):
            if message["role"] != "assistant":
                continue
            text = tokenizer.apply_chat_template(demo["messages"][:place], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            assert prompt[: len(before)] == before
            move = tokenizer.encode(message["content"], add_special_tokens=False)
            assert len(move) == 1
            before = [*prompt, *move, tokenizer.eos_token_id]


@given(text=st.text(max_size=60))
def test_any_text_goes_through_the_tokenizer_and_back(text: str) -> None:
    tokenizer = TOKENIZER
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


TOKENIZER = model.make_tokenizer()


def test_the_base_model_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    sums = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        model.build(tmp_path / name)
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        sums.append((hashlib.sha256(weights).hexdigest(), (tmp_path / name / "tokenizer.json").read_bytes()))
    assert sums[0] == sums[1]


def test_evaluation_games_are_fixed_and_none_is_trained_on() -> None:
    held_out, trained = list(scenarios.evaluation()), list(scenarios.train())
    assert held_out == list(scenarios.evaluation())
    assert len(held_out) == 400
    assert sum(scenario["starts"] for scenario in held_out) == 200
    assert not {s["seed"] for s in held_out} & {s["seed"] for s in trained}


class ScriptedPolicy:
    """Answers with the moves it was given, in place of a model."""

    model = "scripted"

    def __init__(self, choose: Any) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.states: list[str] = []
        completions = SimpleNamespace(create=self._create)
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        self._choose = choose

    def state(self, key: str) -> None:
        self.states.append(key)

    async def _create(self, *, model: str, messages: list[dict[str, str]]) -> Any:
        self.seen.append(list(messages))
        content = self._choose(game.read(messages[-1]["content"]))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))])


def play(choose: Any, scenario: dict[str, Any]) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy(choose)
    return asyncio.run(rollout.rollout(policy, scenario)), policy  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", ["", "0", "10", "X", "the middle", " 5"])
def test_what_is_no_free_cell_loses_at_once(answer: str) -> None:
    outcome, policy = play(lambda board: answer, {"seed": 1, "starts": True})
    assert (outcome.reward, outcome.metrics["illegal"], len(policy.seen)) == (0.0, True, 1)


def test_each_move_names_the_board_that_it_is_made_on() -> None:
    _, policy = play(lambda board: game.free_cells(board)[0], {"seed": 1, "starts": True})
    assert policy.states == [game.read(seen[-1]["content"]) for seen in policy.seen]


def test_legal_random_play_scores_as_known() -> None:
    """Random against random, the first player wins 58.5 %, the second 28.8 %, 12.7 % are drawn (known shares).

    With half of the games begun by the model: wins (58.5 + 28.8) / 2 = 43.6 %. 400 games: within 3.5 standard errors
    of 2.5 % each.
    """
    draw = random.Random(5)
    played = [play(lambda board: draw.choice(game.free_cells(board)), s)[0] for s in scenarios.evaluation()]
    assert sum(outcome.metrics["win"] for outcome in played) / 400 == pytest.approx(0.436, abs=0.087)
    assert sum(outcome.metrics["illegal"] for outcome in played) == 0
    assert all((outcome.reward == 1.0) == outcome.metrics["win"] for outcome in played)


def test_the_same_moves_meet_the_same_opponent() -> None:
    """The attempts of a group differ only by what the model says."""
    scenario = {"seed": "train-3", "starts": False}
    games = [play(lambda board: game.free_cells(board)[0], scenario)[1].seen for _ in range(2)]
    assert games[0] == games[1]
