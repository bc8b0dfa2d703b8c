"""Codenames: the deal, legal clues, what each side sees, demonstrations, and games scored again from what was said."""

import asyncio
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from art_cli.config.compose import load_config
from tests.support.models.recipes import Message, ScriptedPolicy, load
from tests.support.paths import ROOT

recipe = load("codenames")
game, rollout, demos, scenarios = recipe.game, recipe.rollout, recipe.demos, recipe.scenarios
TOKENIZER = recipe.model.make_tokenizer()


def fits(clue: str, word: str) -> bool:
    """Whether a clue is true of a word, by the table of colours alone."""
    if clue in game.WORDS_BY_COLOUR:
        return word in game.WORDS_BY_COLOUR[clue]
    place = game.KINDS.index(clue)
    return word in {words[place] for words in game.WORDS_BY_COLOUR.values()}


def test_each_pair_of_a_kind_and_a_colour_is_one_word() -> None:
    pairs = {(kind, colour) for kind, colour in product(game.KINDS, game.WORDS_BY_COLOUR)}
    assert len(game.MEANINGS) == len(pairs) == 12
    assert {tuple(clue for clue in game.CLUES if fits(clue, word)) for word in game.MEANINGS} == pairs


def test_a_deal_is_fair() -> None:
    """4,000 deals: each word and each place is ours, and the assassin's, as often as any other (chi-square, 99.9 %)."""
    ours, assassins, words = Counter(), Counter(), Counter()
    for seed in range(4000):
        table = game.deal(random.Random(seed))
        assert len(set(table.words)) == 6
        assert len(table.ours) == 3
        assert {*table.ours, table.assassin} <= set(table.words)
        assert table.assassin not in table.ours
        ours.update(table.words.index(word) for word in table.ours)
        assassins[table.words.index(table.assassin)] += 1
        words.update(table.ours)
    for counts, size, bound in ((ours, 6, 20.5), (assassins, 6, 20.5), (words, 12, 31.3)):
        expected = counts.total() / size
        assert sum((counts[key] - expected) ** 2 / expected for key in counts) < bound
        assert len(counts) == size


def test_legal_clues_are_true_of_one_of_our_words() -> None:
    for seed in range(200):
        table = game.deal(random.Random(seed))
        while table.ours:
            legal = {clue for clue in game.CLUES if any(fits(clue, word) for word in table.ours)}
            assert set(game.legal_clues(table)) == legal
            table = table.without(min(table.ours))


def play(answer: Any, seed: Any, clues: int = 3) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy(answer)
    return asyncio.run(rollout.rollout(policy, {"seed": seed, "clues": clues})), policy


def is_spymaster(messages: list[Message]) -> bool:
    return messages[0]["content"] == rollout.SPYMASTER


def words_in(shown: str) -> list[str]:
    """What is on the table, as the guesser sees it."""
    return shown.split("\n")[1:]


def ours_in(shown: str) -> list[str]:
    """Our words that are left, as the spymaster sees them."""
    return shown.partition("\nneutral:")[0].split("\n")[1:]


class Careless:
    """Says any clue and any word of those there are, and seldom something else."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self, messages: list[Message]) -> str:
        if self._draw.random() < 0.02:
            return self._draw.choice(["", "Red", "red 2", "unicorn", "frog frog", "frog", "green"])
        if is_spymaster(messages):
            ours = ours_in(messages[-1]["content"])
            clues = [clue for clue in game.CLUES if any(fits(clue, word) for word in ours)]
            return self._draw.choice(clues)
        return self._draw.choice(words_in(messages[-1]["content"]))


def score_again(policy: ScriptedPolicy, table: Any, clues: int) -> float:
    """The reward by what both sides said, in the order of their calls: a referee with a list of what was touched."""
    touched: list[str] = []
    for messages, said in zip(policy.seen, policy.said, strict=True):
        if is_spymaster(messages):
            clue = said
            if not any(clue in game.CLUES and fits(clue, word) for word in table.ours if word not in touched):
                return -1.0
            continue
        assert messages[-1]["content"].startswith(f"{clue}:\n")
        if said not in table.words or said in touched or said == table.assassin:
            return -1.0
        touched.append(said)
    assert len(touched) == clues
    found = sum(word in table.ours for word in touched)
    return (found - (clues - found)) / clues


@pytest.mark.parametrize(("clues", "rewards"), [(1, {-1, 1}), (2, {-1, 0, 1}), (3, {-1, -1 / 3, 1 / 3, 1})])
def test_hundreds_of_games_are_worth_what_a_referee_says_of_them(clues: int, rewards: set[float]) -> None:
    """Of n words touched k are ours: (2k - n) / n. With three, k is at least 1, because two are nobody's."""
    seen = set()
    for seed in range(400):
        outcome, policy = play(Careless(seed), seed, clues)
        assert outcome.reward == pytest.approx(score_again(policy, game.deal(random.Random(seed)), clues))
        seen.add(outcome.reward)
    assert seen == rewards


def test_the_guesser_sees_nothing_of_whose_the_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same words and other owners, the guesser's conversation is the same until a guess tells."""
    table = game.deal(random.Random(1))
    other = table._replace(ours=frozenset(table.words) - table.ours, assassin=min(table.ours))
    asked = []
    for dealt in (table, other):
        monkeypatch.setattr(rollout, "deal", lambda draw, dealt=dealt: dealt)
        monkeypatch.setattr(rollout, "legal_clues", lambda table: ["red"])
        _, policy = play(lambda messages: "red" if is_spymaster(messages) else table.words[0], 1)
        asked.append(next(messages for messages in policy.seen if not is_spymaster(messages)))
    assert asked[0] == asked[1]


def test_each_call_shows_the_present_table_alone_and_names_it_as_the_state() -> None:
    for seed in range(50):
        _, policy = play(Careless(seed), seed)
        assert all(len(messages) == 2 for messages in policy.seen)
        assert policy.states == [messages[-1]["content"] for messages in policy.seen]


def test_demonstrations_are_legal_and_their_guesses_have_nothing_to_do_with_the_clue() -> None:
    """Guesses fit the clue as often as a word drawn blindly from the table does, within 3.5 standard errors."""
    fitting, expected, variance = 0, 0.0, 0.0
    for demo in demos.turns():
        system, asked, answered = demo["messages"]
        if system["content"] == demos.VOCABULARY:
            assert fits(asked["content"].removesuffix(":"), answered["content"])
            continue
        if system["content"] == rollout.SPYMASTER:
            ours = ours_in(asked["content"])
            assert any(fits(answered["content"], word) for word in ours)
            continue
        clue, words = asked["content"].partition(":")[0], words_in(asked["content"])
        assert answered["content"] in words
        share = sum(fits(clue, word) for word in words) / len(words)
        fitting += fits(clue, answered["content"])
        expected, variance = expected + share, variance + share * (1 - share)
    assert fitting == pytest.approx(expected, abs=3.5 * variance**0.5)


def test_every_word_and_clue_is_one_token_and_the_same_where_it_is_shown_and_said() -> None:
    for word in (*game.MEANINGS, *game.CLUES):
        said = TOKENIZER.encode(word, add_special_tokens=False)
        shown = TOKENIZER.encode(f"\n{word}\n", add_special_tokens=False)
        assert len(said) == 1
        assert shown[1:-1] == said


def test_evaluation_deals_are_fixed_and_none_is_trained_on() -> None:
    held_out, trained = list(scenarios.evaluation()), list(scenarios.train())
    assert held_out == list(scenarios.evaluation())
    assert len({scenario["seed"] for scenario in held_out}) == 400
    assert not {scenario["seed"] for scenario in held_out} & {scenario["seed"] for scenario in trained}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "config-gpu.yaml"])
def test_a_run_may_make_as_many_calls_as_the_longest_game(name: str) -> None:
    """A clue and a guess, as often as the scenario says, which is at most once for each of our words."""
    config = load_config(ROOT / "recipes" / "codenames" / name).config
    for entry in (config.rollout.scenarios, config.eval.scenarios):
        for scenario in getattr(scenarios, entry.source.removeprefix("scenarios.py:"))():
            assert 2 * scenario["clues"] <= config.rollout.max_turns
            assert scenario["clues"] <= game.NUM_OURS
