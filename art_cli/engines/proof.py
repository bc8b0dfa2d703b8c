"""The proof of weights: after a load the engine scores a probe, and its logprobs must be those of the learner.

learner saves       Manifest.origin, Manifest.probe     what the policy consists of, and how it scores the probe
engine loads        WeightProof.prove(engine, ...)      the same probe again -> the digest of the policy
a reply comes       chat/proven_steps.py                names its policy, or waits while a proof is under way

Two rules decide. The level: engine and learner may differ by a few times the rounding that the learner measured on the
probe, when it scored the probe a second time with its embeddings rounded otherwise. The change: two adapters of a run
may differ by less than that at each token, but not in sum. So the engine must show the learner's change since the
adapter before, and since the base model without an adapter. The learner has measured a change twice, as d and as e,
whose roundings are independent, and the engine's scores less the learner's old ones are c. The share of the change that
the engine shows is sum(c w) / sum(d w), where w is e without its largest values: an instrumental variable (Reiersol,
1941), which makes the share 1 for the right weights however far learner and engine round. It is 0 for the weights
before, and about 2 for an adapter of twice the scale. Its error is White's (1980), of right weights, so that a share is
many errors away from 1 by rounding as seldom as a sum of random signs is. Where the error is large, because the change
is small against rounding, the proof is undecided, unless the change is above twice the level's bound.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from math import inf, isfinite, nan, sqrt
from operator import sub
from statistics import median
from typing import NamedTuple, Protocol

from art_cli.runs.manifest import Manifest, Origin, Probe, policy_digest
from art_cli.runtime.errors import CheckpointError, DriftError

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
# Mean absolute gap in nats that the same weights may have whatever the learner measured. float32 allows for the
# rounding of different kernels in deep models.
FLOORS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
ROUNDINGS = 3.0  # largest gap in roundings of the learner; that of vLLM and SmolLM2-135M is 0.5 to 1.3
MOST_GAP = 0.3  # nats; a gap that rounding alone makes as large tells nothing of the weights
TOLERANCE = 0.25  # |share - 1| that an engine may have however small the error is
ERRORS = 5.0  # errors that the share of other weights is away from 1; rounding does it once in a million proofs
CLIP = 2.0  # largest |w|, in medians: a few tokens have most of the change, and most of the rounding


def make_probe(vocabulary: int, *, seed: int = 0) -> list[int]:
    """64 random token ids, which no cache has seen; the same ones for the same vocabulary and seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


def mean_gap(scores: Sequence[float], others: Sequence[float]) -> float:
    """Returns the mean |difference| in nats of two scores of the same tokens."""
    assert len(scores) == len(others), (len(scores), len(others))
    return sum(abs(a - b) for a, b in zip(scores, others, strict=True)) / len(scores)


class Bound(NamedTuple):
    """Gaps of the same weights in nats. Example: Bound(sure=0.15, most=0.15)"""

    sure: float  # above it rounding alone is not known to be smaller
    most: float  # above it the weights are others


def bound_of(dtype: str, probe: Probe) -> Bound:
    """Returns the bound of `mean_gap` for an engine in that dtype."""
    floor = FLOORS.get(dtype, FLOORS["bfloat16"])
    rounding = mean_gap(probe.logprobs, probe.rounded) if probe.rounded else 0.0
    if dtype != "float32" and rounding < FLOORS["float32"]:  # no learner has measured it in that dtype
        return Bound(floor, MOST_GAP)
    most = max(floor, ROUNDINGS * rounding)
    return Bound(min(most, MOST_GAP), most)


class Twice(NamedTuple):
    """The scores of one policy by its learner, in two roundings: [L - 1] logprobs each."""

    plain: list[float]
    rounded: list[float]


class ShownChange(NamedTuple):
    """The part of a learner's change that an engine shows.

    Example: ShownChange(share=0.98, error=0.03, resolution=0.1)
    """

    share: float = nan
    error: float = inf  # standard error of the share
    resolution: float = inf  # standard error of the share 0, which an engine with the weights before has

    @property
    def is_wrong(self) -> bool:
        return abs(self.share - 1) > max(TOLERANCE, ERRORS * self.error)

    @property
    def is_decided(self) -> bool:
        """Whether it tells the weights from those before."""
        return self.is_wrong or ERRORS * max(self.error, self.resolution) <= 1

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % (+- {100 * max(self.error, self.resolution):.0f} %)"


def change_between(before: Twice, now: Twice, engine: Sequence[float]) -> ShownChange:
    """Returns the part of the learner's change that the engine shows.

    The engine may round as the learner's plain scores do, as it does in the same process, but not as its other scores.
    """
    change, again = (list(map(sub, *pair)) for pair in zip(now, before, strict=True))
    most = CLIP * median(map(abs, [*change, *again]))
    weights = [max(-most, min(each, most)) for each in again]
    known = [d * w for d, w in zip(change, weights, strict=True)]
    missing = [(score - own) * w for score, own, w in zip(engine, now.plain, weights, strict=True)]
    if (whole := sum(known)) <= 0:
        return ShownChange()
    error, resolution = (sqrt(sum(each**2 for each in terms)) / whole for terms in (missing, known))
    return ShownChange(1 + sum(missing) / whole, error, resolution)


class WeightVerdict(NamedTuple):
    """What the scores of a probe tell of an engine's weights, which are right if both reasons are empty."""

    gap: float  # mean |engine - learner| in nats
    change: ShownChange  # since the newest reference; of NaN without one
    wrong: str  # reason why the weights are others, or ""
    undecided: str  # reason why they could be others by less than rounding shows, or ""


def judge(engine: Sequence[float], probe: Probe, references: Mapping[str, Twice], *, dtype: str) -> WeightVerdict:
    """Returns the verdict on an engine by its scores of the probe.

    `references` are other policies by what they are called, the newest last. One that the learner scores as the present
    one tells nothing, and is left out.
    """
    gap, bound, change = mean_gap(engine, probe.logprobs), bound_of(dtype, probe), ShownChange()
    wrong, undecided = [], []
    if not gap <= bound.most:
        means = (sum(scores) / len(scores) for scores in (engine, probe.logprobs))
        wrong.append("mean logprob of the probe {:.6f} (engine) against {:.6f} (learner)".format(*means))
        wrong.append(f"gap {gap:.2e} nats, bound {bound.most:.0e}")
    elif gap > bound.sure:
        undecided.append(f"the probe's logprobs differ by {gap:.2f} nats, which rounding alone may do")
    now = Twice(probe.logprobs, probe.rounded)
    for name, before in references.items():
        if before.plain == now.plain:
            continue
        change = change_between(before, now, engine)
        text = f"it shows {change} of the learner's change since {name}"
        if change.is_wrong:
            wrong.append(text)
        elif not change.is_decided and mean_gap(before.plain, now.plain) <= 2 * bound.most:  # else the level decides
            undecided.append(f"{text}, too little against rounding to tell the two apart")
    return WeightVerdict(gap, change, ", ".join(wrong), "; ".join(undecided))


class _Engine(Protocol):
    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of the tokens after the first."""


class ProvenPolicy(NamedTuple):
    """A policy whose engine scored the probe as its learner did. Example: ProvenPolicy("9f3c...", {"probe_gap":
    2e-6})"""

    digest: str
    numbers: dict[str, float]  # metrics of the proof


class WeightProof:
    """Proves the loads of one engine, and remembers the probe of the load before."""

    def __init__(self) -> None:
        self._before: tuple[str, Probe] | None = None  # its name and its probe
        self._has_logged = False

    async def prove(self, engine: _Engine, manifest: Manifest, origin: Origin) -> ProvenPolicy | None:
        """Returns the policy that the engine is proven to sample from, or None if no learner left a proof.

        `origin` is that of the engine: base, template and dtype as they are now. Raises DriftError if the scores are
        those of other weights, CheckpointError if its chat template is not the one of the checkpoint's training.
        """
        if manifest.origin is None or manifest.probe is None:
            return None
        if manifest.origin.template != origin.template:
            raise CheckpointError(
                f"step {manifest.step}: the chat template is not the one that it was trained with, so that it would "
                "read other prompts; restore the template of its base model or of its checkpoint"
            )
        score, tokens = getattr(engine, "score_replicas", None), manifest.probe.tokens
        found = [await engine.score(tokens)] if score is None else await score(tokens)
        verdict = self.check(found, manifest.probe, dtype=origin.dtype, name=f"step {manifest.step}")
        numbers = {"probe_gap": verdict.gap, "probe_undecided": float(bool(verdict.undecided))}
        if isfinite(verdict.change.error):
            numbers |= {"probe_share": verdict.change.share, "probe_share_error": verdict.change.error}
        return ProvenPolicy(policy_digest(origin, manifest.files), numbers)

    def check(self, found: Sequence[Sequence[float]], probe: Probe, *, dtype: str, name: str = "") -> WeightVerdict:
        """Returns the verdict on weights that may be the right ones, by the scores of each replica of the engine.

        Raises DriftError if they are others. The first undecided proof is logged.
        """
        references = {"the base model": Twice(probe.base, probe.base_rounded)} if probe.base else {}
        if self._before is not None and self._before[1].tokens == probe.tokens and probe.rounded:
            name_before, before = self._before[0], Twice(self._before[1].logprobs, self._before[1].rounded)
            if before not in references.values():
                references[name_before] = before
        at = f"{name}: " if name else ""
        verdicts = [judge(scores, probe, references, dtype=dtype) for scores in found]
        for rank, verdict in enumerate(verdicts):
            who = f"vLLM's replica {rank + 1}" if len(found) > 1 else "the engine"
            if verdict.wrong:
                raise DriftError(f"{at}{who} does not sample from the learner's weights: {verdict.wrong}")
            if verdict.undecided and not self._has_logged:
                self._has_logged = True
                log.warning("%sthe proof of %s's weights is undecided: %s", at, who, verdict.undecided)
        self._before = name or "the adapter before", probe
        return max(verdicts, key=lambda each: each.gap)
