"""The proof of weights: after a load the engine scores a probe, and its logprobs must be those of the learner.

learner saves       Manifest.origin, Manifest.probe     what the policy consists of, and how it scores the probe
engine loads        prove(engine, manifest, ...)        the same probe again -> the digest of the policy
a reply comes       chat/proven_steps.py                names its policy, or waits while a proof is under way
"""

import random
from typing import NamedTuple, Protocol

from art_cli.runs.manifest import Manifest, Origin, Probe, policy_digest
from art_cli.runtime.errors import CheckpointError, DriftError

PROBE_TOKENS = 64
# Largest mean absolute gap in nats. float32 allows for the rounding of different kernels in deep models. bfloat16 has
# 8 bits of mantissa, which is about 0.01 nats a token.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


def make_probe(vocabulary: int, *, seed: int = 0) -> list[int]:
    """64 random token ids, which no cache has seen; the same ones for the same vocabulary and seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


def compare(engine: list[float], learner: list[float], *, dtype: str, step: int | None = None) -> float:
    """Returns the mean absolute gap in nats of two scores of the probe. Raises DriftError if it exceeds the bound."""
    gap, bound = mean_gap(engine, learner), bound_of(dtype)
    if not gap <= bound:
        at = "" if step is None else f"step {step}: "
        raise DriftError(
            f"{at}the engine does not sample from the learner's weights: mean logprob of the probe "
            f"{sum(engine) / len(engine):.6f} (engine) against {sum(learner) / len(learner):.6f} (learner), "
            f"gap {gap:.2e} nats, bound {bound:.0e}"
        )
    return gap


def mean_gap(scores: list[float], others: list[float]) -> float:
    """Returns the mean |difference| in nats of two scores of the same tokens."""
    assert len(scores) == len(others), (len(scores), len(others))
    return sum(abs(a - b) for a, b in zip(scores, others, strict=True)) / len(scores)


def bound_of(dtype: str) -> float:
    """Returns the largest `mean_gap` of the same weights in that dtype."""
    return BOUNDS.get(dtype, BOUNDS["bfloat16"])


class _Learner(Protocol):
    def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of the tokens after the first."""


def measure(learner: _Learner, vocabulary: int, *, seed: int = 0) -> Probe:
    """Returns a probe of the learner's weights as they are now."""
    tokens = make_probe(vocabulary, seed=seed)
    return Probe(tokens=tokens, logprobs=learner.score(tokens))


class _Engine(Protocol):
    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of the tokens after the first."""


class ProvenPolicy(NamedTuple):
    """A policy whose engine scored the probe as its learner did. Example: ProvenPolicy("9f3c...", 2.1e-6)"""

    digest: str
    gap: float  # mean absolute difference of the scores in nats


async def prove(engine: _Engine, manifest: Manifest, origin: Origin) -> ProvenPolicy | None:
    """Returns the policy that the engine is proven to sample from, or None if no learner left a proof.

    `origin` is that of the engine: base, template and dtype as they are now. Raises DriftError if the scores are those
    of other weights, CheckpointError if its chat template is not the one that the checkpoint was trained with.
    """
    if manifest.origin is None or manifest.probe is None:
        return None
    if manifest.origin.template != origin.template:
        raise CheckpointError(
            f"step {manifest.step}: the chat template is not the one that it was trained with, so that it would read "
            "other prompts; restore the template of its base model or of its checkpoint"
        )
    probe = manifest.probe
    gap = compare(await engine.score(probe.tokens), probe.logprobs, dtype=origin.dtype, step=manifest.step)
    return ProvenPolicy(policy_digest(origin, manifest.files), gap)
