"""TextEncoder returns the tokenizer's own tokens, regardless of its cache."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from art_cli.chat.requests import Request, Sampling
from art_cli.engines.embedded import chat_prompts as messages
from art_cli.engines.embedded import reply_text
from art_cli.engines.embedded.reply_text import TextEncoder
from tests.support.models.tiny import tiny_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>"]
PIECES = st.sampled_from([*MARKS, "<|im_", "start|>", "user\n", " a", "a ", "\n", " ", "é", "1", "ab"]) | st.text(
    max_size=4
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def merging(*added: AddedToken, **steps: object) -> PreTrainedTokenizerFast:
    """A tokenizer that joins letters: "ab", " a", "aa" and "<|" are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("a", "a"), ("<", "|")]
    vocabulary = {letter: id for id, letter in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\s+\S*"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(steps.get("prefix")), use_regex=False),
        ]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


CHAT = (special("<|im_start|>"), special("<|im_end|>"))
TOKENIZERS = {
    "bytes": tiny_tokenizer(),
    "merging": merging(*CHAT, AddedToken("<tool_call>", normalized=False)),
    "prefix": merging(*CHAT, prefix=True),
    "longer": merging(*CHAT, special("a<|im_start|>")),
    "overlapping": merging(*CHAT, special("b<|im_"), special("|>a")),
    "lstrip": merging(*CHAT, special("<|endoftext|>", lstrip=True)),
    "rstrip": merging(special("<|im_start|>"), special("<|im_end|>", rstrip=True)),
    "word": merging(*CHAT, special("user", single_word=True)),
}
ENCODERS = {name: TextEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=75, deadline=None)
@given(texts=st.lists(TEXTS, max_size=3))
def test_the_tokens_are_those_of_the_whole_text(name: str, texts: list[str]) -> None:
    """This also holds for repeated texts and for continued texts."""
    whole = "".join(texts)
    for text in (*texts, whole, whole):
        assert ENCODERS[name].encode(text, adds_special=False) == TOKENIZERS[name].encode(
            text, add_special_tokens=False
        )


def test_a_message_that_was_seen_is_not_tokenized_again() -> None:
    tokenizer = merging(*CHAT)
    encoder = TextEncoder(tokenizer)
    first = encoder.encode("<|im_start|>user\naaab<|im_end|>", adds_special=False)
    asked: list[str] = []
    own = tokenizer.encode

    def encode(text: str, **given: bool) -> list[int]:
        asked.append(text)
        ids: list[int] = own(text, **given)
        return ids

    tokenizer.encode = encode
    both = encoder.encode("<|im_start|>user\naaab<|im_end|>\n<|im_start|>ab", adds_special=False)
    assert both[: len(first)] == first
    assert asked == ["<|im_end|>\n", "<|im_start|>ab"]


def test_a_text_of_many_new_parts_is_tokenized_as_a_whole() -> None:
    """Part-by-part tokenization takes ten times longer, which clients with many short messages could exploit."""
    tokenizer = merging(*CHAT)
    encoder = TextEncoder(tokenizer)
    text = "".join(f"<|im_start|>{number}" for number in range(1000))
    assert encoder.encode(text, adds_special=False) == tokenizer.encode(text, add_special_tokens=False)
    assert not encoder._known


@pytest.mark.parametrize("name", ["lstrip", "word"])
def test_a_text_is_not_cut_where_a_token_depends_on_what_stands_around_it(name: str) -> None:
    assert reply_text._marks(TOKENIZERS[name]) is None


def test_a_text_is_not_cut_by_a_tokenizer_that_treats_a_beginning_otherwise() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([special("<s>")])
    assert reply_text._marks(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_text, "MAX_KEPT", 10_000)
    encoder = TextEncoder(merging(*CHAT))
    for number in range(50):
        encoder.encode(f"<|im_start|>number {number}<|im_end|>", adds_special=False)
    sizes = [reply_text.PART_BYTES + len(part) + 4 * len(ids) for part, ids in encoder._known.items()]
    assert sum(sizes) == encoder._num_bytes <= 10_000 and len(sizes) > 10


@pytest.mark.slow
@pytest.mark.parametrize("letters", [8, 2000])
def test_what_is_remembered_takes_the_memory_that_it_is_counted_with(letters: int) -> None:
    """Many short parts, as prompts of a load test are, and few long ones, of ids that Python makes anew each time."""
    encoder = TextEncoder(merging(*CHAT))
    encoder._whole = lambda part: [300 + ord(letter) for letter in part]  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        for number in range(100_000_000 // (letters + 500) // 40):
            encoder.encode(f"<|im_start|>{number:0{letters}}", adds_special=False)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.5 * encoder._num_bytes < taken < 1.2 * encoder._num_bytes


def asking(content: str = "hi", **fields: Any) -> Request:
    return Request(model="policy", sampling=Sampling(), messages=[{"role": "user", "content": content}], **fields)


@pytest.mark.parametrize(
    ("request_", "is_short"),
    [
        (asking(), True),
        (asking("a" * 5000), False),
        (asking(tools=[{"function": {"name": "f", "parameters": {"k" * 5000: {}}}}]), False),
        (asking(tools=[[]] * 5000), False),
        (asking(template_kwargs={"enable_thinking": False}), False),
        (asking(response_format={"type": "json_object"}), False),
        (Request(model="policy", sampling=Sampling(), prompt=[1] * 5000), False),
        (Request(model="policy", sampling=Sampling(), prompt="a" * 100), True),
    ],
)
def test_only_a_short_request_is_rendered_on_the_event_loop(request_: Request, is_short: bool) -> None:
    assert messages.is_short(request_) is is_short
