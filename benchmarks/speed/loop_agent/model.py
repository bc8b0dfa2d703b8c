"""A Qwen3 of 24M random parameters with 8,192 tokens. It says those 1,500 that are whole words behind a space."""

import random
from pathlib import Path
from typing import Any

from art_cli.models import builtin_models

NUM_TOKENS = 8192
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words() -> list[str]:
    """Different words of five letters, the same each time."""
    draw = random.Random(0)
    found = {"".join(draw.choices(LETTERS, k=5)): None for _ in range(9000)}
    return list(found)


def make_tokenizer() -> Any:
    # More words than fit: the merges that make them are tokens too. The most frequent are whole, so some are often.
    text = " " + " ".join(word for number, word in enumerate(words()) for _ in range(1 + 2 * (number < 1500)))
    return builtin_models.make_tokenizer([text], most_tokens=NUM_TOKENS)


def build(directory: Path) -> None:
    tokenizer = make_tokenizer()
    builtin_models.build(directory, tokenizer, hidden=384, layers=11, heads=6, positions=2048)
    keep_words(directory, tokenizer)


def keep_words(directory: Path, tokenizer: Any) -> None:
    """Only words of one token keep a large embedding, so that the model says no others. Text of random pieces of words
    would be split into other tokens when it comes back in the next prompt, which would then not continue the sampled
    ones. The small embeddings are not zero: a norm of a zero first token multiplies its gradient by a thousand, and
    after 28 layers it is no number.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    whole = [ids[0] for ids in tokenizer([" " + word for word in words()[:1500]])["input_ids"] if len(ids) == 1]
    kept = embedding[whole].clone()
    embedding.mul_(0.01)[whole] = kept
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
