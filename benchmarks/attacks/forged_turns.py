"""Texts that try to write control tokens: how many do, what that costs, and that ordinary conversations stay the same.

    python -m benchmarks.attacks.forged_turns [--ordinary 10000] [--rounds 200]

The bank (tests/support/attacks/forged_turns.py): every special and tag-like token of each tokenizer, in each form, at
each position of a request. A text forges if the control tokens of its prompt are other ones than those of a harmless
text of the same length. `plain` is the same bank where the rendered text is tokenized as it is. `lost`: the prompt no
longer spells the text. Ordinary conversations are drawn by seed and compared with transformers' own rendering, token by
token. Costs are medians over pairs of calls, guarded and plain in turn, of the whole way from a request to its tokens.
All of the conversation but its rendering is remembered from the call before, as in a rollout that goes on.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from art_cli.chat.control_tokens import ControlTokens, Guard
from art_cli.engines.embedded import chat_prompts as messages
from art_cli.engines.embedded.reply_text import Vocabulary
from tests.support.attacks import forged_turns
from tests.support.attacks.forged_turns import FORMS, HI, MAKERS, POSITIONS, Asked, control_texts

WORDS = "the tool gave an answer, which is written down here: it is 3 < 4 and so on. " * 8


class Open(Guard):
    """Guards nothing, as art did before."""

    def __init__(self, controls: ControlTokens, *values: Any) -> None:
        super().__init__(controls)

    def messages(self, messages: Any) -> Any:
        return messages

    def value(self, value: Any) -> Any:
        return value

    def json(self, text: str) -> str:
        return text

    def restored(self, text: str) -> str:
        return text


@contextmanager
def unguarded() -> Iterator[None]:
    own = messages.Guard
    messages.Guard = Open  # type: ignore[misc]
    try:
        yield
    finally:
        messages.Guard = own  # type: ignore[misc]


def bank(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Each position with each text."""
    turn = forged_turns.whole_turn(vocabulary)
    marks = sorted(set(control_texts(vocabulary.tokenizer).values()))
    texts = dict.fromkeys(form(mark, turn) for mark in marks for form in FORMS.values())
    return [(position, text) for position in POSITIONS for text in texts]


def count(vocabulary: Vocabulary, tried: list[tuple[str, str]]) -> dict[str, int]:
    forged = [forged_turns.is_forged(vocabulary, position, text) for position, text in tried]
    is_exact = vocabulary.tokenizer.backend_tokenizer.normalizer is None
    lost = [not forged_turns.is_kept(vocabulary, position, text) for position, text in tried] if is_exact else []
    with unguarded():
        plain = [forged_turns.is_forged(vocabulary, position, text) for position, text in tried]
    return {
        "tried": len(forged) - forged.count(None),
        "refused": forged.count(None),
        "forged": forged.count(True),
        "lost": lost.count(True),
        "plain": plain.count(True),
    }


def count_ordinary(vocabularies: dict[str, Vocabulary], number: int) -> tuple[int, int, int]:
    """Conversations compared, with other tokens than transformers', and refused by the template or with a marker."""
    draw, compared, differing, left_out = random.Random(0), 0, 0, 0
    names = [*vocabularies]
    while compared < number:
        vocabulary = vocabularies[names[(compared + left_out) % len(names)]]
        asked = forged_turns.ordinary(draw)
        has_mark = any(mark in str(asked) for mark in control_texts(vocabulary.tokenizer).values())
        expected = None if has_mark else forged_turns.plain_ids(vocabulary.tokenizer, asked)
        if expected is None:
            left_out += 1
            continue
        compared += 1
        differing += forged_turns.ids_of(vocabulary, asked) != expected
    return compared, differing, left_out


def cost(vocabulary: Vocabulary, asked: Asked, rounds: int) -> tuple[float, float, float]:
    """Median microseconds guarded and plain, and the median of the ratios of the pairs."""

    def seconds() -> float:
        started = time.perf_counter()
        forged_turns.ids_of(vocabulary, asked)
        return time.perf_counter() - started

    pairs = []
    for _ in range(rounds + 5):
        guarded = seconds()
        with unguarded():
            pairs.append((guarded, seconds()))
    pairs = pairs[5:]
    guarded, plain = ([pair[side] * 1e6 for pair in pairs] for side in (0, 1))
    ratio = statistics.median(guarded / plain for guarded, plain in pairs)
    return statistics.median(guarded), statistics.median(plain), ratio


def talk(text: str) -> Asked:
    """Nine messages: a short one, seven of 608 characters, and the text."""
    said = [{"role": ("user", "assistant")[turn % 2], "content": WORDS} for turn in range(6)]
    return Asked([HI, {"role": "assistant", "content": WORDS}, *said, {"role": "user", "content": text}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ordinary", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    found = {name: forged_turns.vocabulary(name) for name in MAKERS}
    vocabularies = {name: vocabulary for name, vocabulary in found.items() if vocabulary is not None}
    print(f"{len(vocabularies)} tokenizers, {len(POSITIONS)} positions, {len(FORMS)} forms\n")
    print("| tokenizer | control tokens | texts | tried | forged | lost | plain: forged | template refuses |")
    print("|---|---|---|---|---|---|---|---|")
    total: dict[str, int] = {}
    for name, vocabulary in vocabularies.items():
        tried = bank(vocabulary)
        counts = count(vocabulary, tried)
        total = {key: total.get(key, 0) + value for key, value in counts.items()}
        num_marks, num_texts = len(set(control_texts(vocabulary.tokenizer).values())), len(tried) // len(POSITIONS)
        row: list[Any] = [counts[key] for key in ("tried", "forged", "lost", "plain", "refused")]
        if vocabulary.tokenizer.backend_tokenizer.normalizer is not None:
            row[2] = "-"  # it changes texts itself, so that they are not compared
        print(f"| {name} | {num_marks} | {num_texts} | {' | '.join(map(str, row))} |", flush=True)
    row = [total[key] for key in ("tried", "forged", "lost", "plain", "refused")]
    print(f"| together | | | {' | '.join(map(str, row))} |\n", flush=True)
    compared, differing, left_out = count_ordinary(vocabularies, options.ordinary)
    print(
        f"ordinary conversations: {compared} compared, {differing} with other tokens than before, {left_out} left out"
    )
    print("\n| cost of a prompt | tokenizer | guarded, us | plain, us | ratio |\n|---|---|---|---|---|")
    for name in ("bytes", "SmolLM2", "Llama 3"):
        if name not in vocabularies:
            continue
        turn = forged_turns.whole_turn(vocabularies[name])
        texts = {"no marker": WORDS, "a marker's beginning": WORDS + turn[:4], "a forged turn": WORDS + turn}
        for what, text in texts.items():
            guarded, plain, ratio = cost(vocabularies[name], talk(text), options.rounds)
            print(f"| {what} | {name} | {guarded:.0f} | {plain:.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
