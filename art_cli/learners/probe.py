"""A policy's probe: text sampled from the model and its logprobs, with two roundings, with and without the adapter.

engines/proof.py compares an engine's logprobs with the probe.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from art_cli.models.decoder.forward import rounded_otherwise
from art_cli.models.weights import Weights
from art_cli.runs.manifest import Probe

# Number of probe tokens, which each step scores three times. Below float32, one training step changes an adapter's
# logprobs by less than rounding error per token, so several hundred tokens are needed to see the difference
# (benchmarks/attacks/weight_proof.py).
NUM_TOKENS, NUM_TOKENS_FLOAT32 = 512, 64
LENGTH = 32  # tokens per sampled text
MARK = "@@probe@@"  # replaces a user message in the chat template; the model continues the text before it
DIGITS = 6  # decimal places kept per logprob; float32 rounds at the fifth
Score = Callable[[Sequence[int]], list[float]]


def measure_probe(weights: Weights, score: Score, before: Probe | None = None) -> Probe:
    """Returns a probe of the current weights. `score` gives [L - 1] logprobs from the current model.

    `before` is an earlier probe with the same base model and dtype. Its text and base scores are reused.
    """
    with weights.lock:
        tokens = own_text(weights) if before is None else before.tokens
        base: tuple[list[float], list[float]] = ([], [])
        if weights.has_adapter and before is not None and before.base:
            base = before.base, before.base_rounded
        elif weights.has_adapter:
            with weights.adapter_off():
                base = _score_twice(weights, score, tokens)
        logprobs, rounded = _score_twice(weights, score, tokens)
    return Probe(tokens=tokens, logprobs=logprobs, rounded=rounded, base=base[0], base_rounded=base[1])


def _score_twice(weights: Weights, score: Score, tokens: list[int]) -> tuple[list[float], list[float]]:
    scores = score(tokens)
    with rounded_otherwise(weights.inner_model, weights.dtype):
        rounded = score(tokens)
    return [round(each, DIGITS) for each in scores], [round(each, DIGITS) for each in rounded]


@torch.no_grad()
def own_text(weights: Weights, *, seed: int = 0) -> list[int]:
    """Returns token ids sampled from the model at temperature 1: the concatenated beginnings of several chats."""
    model, draw = weights.inner_model, torch.Generator().manual_seed(seed)
    # Unsloth's models need a cache class other than transformers'
    has_cache = model.forward.__module__.startswith("transformers")
    num = min(NUM_TOKENS_FLOAT32 if weights.dtype == torch.float32 else NUM_TOKENS, weights.max_length - 1)
    chat = [{"role": "user", "content": MARK}]
    start = weights.tokenizer.apply_chat_template(chat, tokenize=False).partition(MARK)[0]
    first = weights.tokenizer.encode(start, add_special_tokens=False) or [0]
    ids = text = torch.tensor([first] * -(-num // LENGTH))
    cache: Any = None
    for _ in range(min(num, LENGTH)):
        given = (text if cache is None else ids).to(weights.device)
        output = model(input_ids=given, past_key_values=cache, use_cache=has_cache, logits_to_keep=1)
        cache = output.past_key_values if has_cache else None
        ids = torch.multinomial(output.logits[:, -1].float().softmax(-1).cpu(), 1, generator=draw)
        text = torch.cat([text, ids], 1)
    return [*first, *text[:, len(first) :].flatten().tolist()][:num]
