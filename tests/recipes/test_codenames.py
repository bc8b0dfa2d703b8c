"""Codenames: the deal, legal clues, what each side sees, demonstrations, and games scored again from what was said."""

import asyncio
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from art_cli.config.compose import load_config
from tests.support.paths import ROOT
from tests.support.recipes import Message, ScriptedPolicy, load

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
    assert len(game.MEANINGS) == len(pairs) == 16
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
    for counts, size, bound in ((ours, 6, 20.5), (assassins, 6, 20.5), (words, 16, 37.7)):
        expected = counts.total() / size
        assert sum((counts[key] - expected) ** 2 / expected for key in counts) < bound
        assert len(counts) == size


def test_legal_clues_are_true_of_one_of_our_words() -> None:
    for seed in range(200):
        table = game.deal(random.Random(seed))
        legal = {
            f"{clue} {number}"
            for clue, number in product(game.CLUES, (1, 2, 3))
            if any(fits(clue, word) for word in table.ours)
        }
        assert set(game.legal_clues(table)) == legal
        left = table.without(next(iter(table.ours)))
        assert {clue.split()[1] for clue in game.legal_clues(left)} == {"1", "2"}


def play(answer: Any, seed: Any) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy(answer)
    return asyncio.run(rollout.rollout(policy, {"seed": seed})), policy


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
            return self._draw.choice(["", "red", "red 9", "unicorn", "frog frog"])
        if is_spymaster(messages):
            ours = ours_in(messages[-1]["content"])
            clues = [clue for clue in game.CLUES if any(fits(clue, word) for word in ours)]
            return f"{self._draw.choice(clues)} {self._draw.randint(1, len(ours))}"
        return self._draw.choice(words_in(messages[-1]["content"]))


def score_again(policy: ScriptedPolicy, table: Any) -> float:
    """The reward by what both sides said, in the order of their calls: a referee with a list of what was touched."""
    touched: list[str] = []
    clue, allowed = "", 0
    for messages, said in zip(policy.seen, policy.said, strict=True):
        hidden = [word for word in table.ours if word not in touched]
        if is_spymaster(messages):
            clue, _, number = said.partition(" ")
            is_true = clue in game.CLUES and any(fits(clue, word) for word in hidden)
            if not is_true or number not in [str(n + 1) for n in range(len(hidden))]:
                return -1.0
            allowed = int(number)
            continue
        assert messages[-1]["content"].startswith(f"{clue} {allowed}\n")
        if said not in table.words or said in touched or said == table.assassin:
            return -1.0
        touched.append(said)
        allowed -= 1
    found = sum(word in table.ours for word in touched)
    return (found - (len(touched) - found)) / 3


def test_a_thousand_games_are_worth_what_a_referee_says_of_them() -> None:
    seen = set()
    for seed in range(1000):
        outcome, policy = play(Careless(seed), seed)
        assert outcome.reward == pytest.approx(score_again(policy, game.deal(random.Random(seed))))
        assert len(policy.seen) <= 7
        seen.add(round(3 * outcome.reward))
    assert seen == {-3, -2, -1, 0, 1, 2, 3}


def test_a_clue_has_as_many_guesses_as_its_number_until_one_is_wrong() -> None:
    """All guesses at a clue but the last are ours; there are fewer than the number only after a wrong one."""
    for seed in range(300):
        outcome, policy = play(Careless(seed), seed)
        if outcome.metrics["illegal"] or outcome.metrics["assassin"]:
            continue
        table = game.deal(random.Random(seed))
        rounds: list[tuple[int, list[bool]]] = []
        for messages, said in zip(policy.seen, policy.said, strict=True):
            if is_spymaster(messages):
                rounds.append((int(said.split()[1]), []))
            else:
                rounds[-1][1].append(said in table.ours)
        assert len(rounds) == 2 or outcome.metrics["found"] == 3
        for number, right in rounds:
            assert all(right[:-1])
            assert len(right) == number or not right[-1]


def test_the_guesser_sees_nothing_of_whose_the_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same words and other owners, the guesser's conversation is the same until a guess tells."""
    table = game.deal(random.Random(1))
    other = table._replace(ours=frozenset(table.words) - table.ours, assassin=min(table.ours))
    asked = []
    for dealt in (table, other):
        monkeypatch.setattr(rollout, "deal", lambda draw, dealt=dealt: dealt)
        monkeypatch.setattr(rollout, "legal_clues", lambda table: ["red 1"])
        _, policy = play(lambda messages: "red 1" if is_spymaster(messages) else table.words[0], 1)
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
        if system["content"] == rollout.SPYMASTER:
            ours = ours_in(asked["content"])
            clue, number = answered["content"].split()
            assert any(fits(clue, word) for word in ours)
            assert 1 <= int(number) <= len(ours)
            continue
        clue, words = asked["content"].split()[0], words_in(asked["content"])
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


@pytest.mark.parametrize("name", ["config.yaml", "config-gpu.yaml"])
def test_a_run_may_make_as_many_calls_as_the_longest_game(name: str) -> None:
    """Each clue can end with one wrong word, so the longest game has two clues, two wrong words and all of ours."""
    config = load_config(ROOT / "recipes" / "codenames" / name).config
    assert config.rollout.max_turns == 2 * rollout.NUM_CLUES + game.NUM_OURS
