"""The proof of weights: after a load, engine and learner score the same probe, and their logprobs must agree."""

import random

from art_cli.errors import DriftError

PROBE_TOKENS = 64
# Largest mean absolute gap in nats. float32 allows for the rounding of different kernels in deep models. bfloat16 has
# 8 bits of mantissa, which is about 0.01 nats a token.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


def make_probe(vocabulary: int, *, seed: int = 0) -> list[int]:
    """64 random token ids, which no cache has seen; the same ones for the same vocabulary and seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


def compare(engine: list[float], learner: list[float], *, dtype: str, step: int) -> float:
    """The mean absolute gap in nats between two scores of the probe. Raises DriftError: above the dtype's bound."""
    assert len(engine) == len(learner), (len(engine), len(learner))
    gap = sum(abs(a - b) for a, b in zip(engine, learner, strict=True)) / len(engine)
    bound = BOUNDS.get(dtype, BOUNDS["bfloat16"])
    if not gap <= bound:
        raise DriftError(
            f"step {step}: the engine does not sample from the learner's weights: mean logprob of the probe "
            f"{sum(engine) / len(engine):.6f} (engine) against {sum(learner) / len(learner):.6f} (learner), "
            f"gap {gap:.2e} nats, bound {bound:.0e}"
        )
    return gap
