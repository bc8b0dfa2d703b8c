"""What holding replies to a JSON schema costs the embedded engine, per token, with a vocabulary of 150,000.

    python benchmarks/held_replies.py [--vocab 151936] [--batch 32] [--steps 200]

Draws tokens from random logits as the worker does: free rows, then the same rows each held to a schema. Prints wall and
processor time per token of both, and of free rows beside one that is held.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from art_cli.engines.embedded import token_sampling as sampling
from art_cli.engines.embedded.grammars import Masks
from art_cli.engines.embedded.token_sampling import Allowed, Knobs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STOP = 256


def make_tokenizer(vocab: int) -> LLTokenizer:
    """Bytes, a stop token, and seeded pairs of earlier tokens up to 12 letters long."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: id for id, letter in enumerate(letters)} | {"<|end|>": STOP}
    names, merges, draw = list(letters), list[tuple[str, str]](), np.random.default_rng(0)
    while len(words) < vocab:
        left, right = (names[int(place)] for place in draw.integers(0, len(names), 2))
        if len(left + right) <= 12 and left + right not in words:
            words[left + right] = len(words)
            names.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return LLTokenizer(tokenizer.to_str(), n_vocab=vocab, eos_token=[STOP])


def measure(tokenizer: LLTokenizer, logits: torch.Tensor, num_held: int, steps: int) -> dict[str, Any]:
    """Microseconds per token, everything that the worker does between the model and the next plan."""
    batch, vocab = logits.shape
    start = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    matchers = [start.deep_copy() for _ in range(num_held)]
    masks, rows, mask_s = Masks(vocab, torch.get_num_threads()), np.arange(num_held), 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        knobs = Knobs(
            np.ones(batch, np.float32), np.ones(batch, np.float32), np.zeros(batch, np.int64),
            np.arange(batch, dtype=np.uint64), np.full(batch, step),
        )  # fmt: skip
        begin = time.perf_counter()
        allowed = Allowed(rows, masks.allowed(matchers)) if num_held else None
        mask_s += time.perf_counter() - begin
        ids = sampling.draw(logits, knobs, allowed).ids
        for place, matcher in enumerate(matchers):
            matcher.consume_token(int(ids[place]))
            if matcher.is_stopped():
                matchers[place] = start.deep_copy()
    scale = 1e6 / (steps * batch)
    return {
        "held": num_held,
        "wall_us_per_token": round((time.perf_counter() - wall) * scale, 1),
        "cpu_us_per_token": round((time.process_time() - cpu) * scale, 1),
        "mask_us_per_held_token": round(mask_s * 1e6 / (steps * num_held), 1) if num_held else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("vocab", 151_936), ("batch", 32), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    tokenizer = make_tokenizer(options.vocab)
    logits = 3 * torch.randn(options.batch, options.vocab, generator=torch.Generator().manual_seed(0))
    for num_held in (0, 1, options.batch):
        print(json.dumps(measure(tokenizer, logits, num_held, options.steps)), flush=True)


if __name__ == "__main__":
    main()
