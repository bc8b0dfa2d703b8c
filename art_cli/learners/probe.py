"""The probe of a policy: text of the model's own, and how the learner scores it, in two roundings, with its adapter and
without. engines/proof.py compares an engine's scores with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from art_cli.models.decoder.forward import rounded_otherwise
from art_cli.models.weights import Weights
from art_cli.runs.manifest import Probe

# Tokens of a probe. Below float32, adapters one step apart differ by less than rounding at each token, and some
# hundred tokens tell them apart (benchmarks/attacks/weight_proof.py).
NUM_TOKENS, NUM_TOKENS_FLOAT32 = 512, 96
LENGTH = 32  # tokens of each text that is sampled
MARK = "@@probe@@"  # takes a user's place in the chat template; the model writes what follows what comes before it
DIGITS = 6  # digits after the point that are kept of a logprob; float32 rounds at the fifth
Score = Callable[[Sequence[int]], list[float]]


def measure_probe(weights: Weights, score: Score, before: Probe | None = None) -> Probe:
    """Returns the probe of the weights as they are now. `score` gives [L - 1] logprobs by the present model.

    `before` is an earlier probe of the same base model and dtype, whose text and scores of the base are taken.
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
    with rounded_otherwise(_bare(weights), weights.dtype):
        rounded = score(tokens)
    return [round(each, DIGITS) for each in scores], [round(each, DIGITS) for each in rounded]


@torch.no_grad()
def own_text(weights: Weights, *, seed: int = 0) -> list[int]:
    """Returns token ids that the model samples at temperature 1: the beginnings of a few chats, one after the other."""
    model, draw = _bare(weights), torch.Generator().manual_seed(seed)
    # Unsloth's models take a cache that is not transformers'
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


def _bare(weights: Weights) -> Any:
    return weights.model.get_base_model() if weights.has_adapter else weights.model
