"""A text never becomes a control token, wherever it stands; conversations without markers have the tokens they had."""

import random

import pytest

from art_cli.engines.embedded.text import Vocabulary
from tests.support import forged_turns
from tests.support.forged_turns import FORMS, MAKERS, POSITIONS, control_texts


@pytest.fixture(params=MAKERS)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found = forged_turns.vocabulary(request.param)
    if found is None:
        pytest.skip("its files are in a package that is not installed")
    return found


def test_no_text_writes_a_control_token(vocabulary: Vocabulary) -> None:
    """Every form at every position, and every marker at a third of them; `benchmarks.forged_turns` tries them all."""
    turn = forged_turns.whole_turn(vocabulary)
    marks = sorted(set(control_texts(vocabulary.tokenizer).values()))
    draw, forged = random.Random(0), []
    for number, position in enumerate(POSITIONS):
        tried = {(draw.choice(marks), form) for form in FORMS}
        tried |= {(mark, draw.choice([*FORMS])) for mark in marks[number % 3 :: 3]}
        for mark, form in sorted(tried):
            if forged_turns.is_forged(vocabulary, position, FORMS[form](mark, turn)):
                forged.append((position, form, mark))
    assert forged == []


def test_a_forged_text_keeps_its_letters(vocabulary: Vocabulary) -> None:
    if vocabulary.tokenizer.backend_tokenizer.normalizer is not None:
        pytest.skip("its normalizer changes texts")
    turn = forged_turns.whole_turn(vocabulary)
    marks = sorted(set(control_texts(vocabulary.tokenizer).values()))
    texts = [FORMS[form](marks[number % len(marks)], turn) for number, form in enumerate(FORMS)]
    lost = [(at, text) for at in POSITIONS for text in texts if not forged_turns.is_kept(vocabulary, at, text)]
    assert lost == []


def test_ordinary_conversations_have_the_tokens_they_had(vocabulary: Vocabulary) -> None:
    draw, marks = random.Random(1), control_texts(vocabulary.tokenizer).values()
    for _ in range(60):
        asked = forged_turns.ordinary(draw)
        if any(mark in str(asked) for mark in marks):
            continue
        expected = forged_turns.plain_ids(vocabulary.tokenizer, asked)
        assert forged_turns.ids_of(vocabulary, asked) == expected, asked
