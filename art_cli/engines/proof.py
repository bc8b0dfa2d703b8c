"""Weight proofs: after a load the engine scores a probe, and the logprobs must match the learner's.

learner saves       Manifest.origin, Manifest.probe     the policy's components, and the learner's probe scores
engine loads        WeightProof.prove(engine, ...)      scores the probe again -> the policy digest
a reply comes       chat/proven_steps.py                names its policy, or waits for a pending proof

Two rules decide. Level: engine and learner may differ by a few times the rounding error. The learner measured this
error by scoring the probe a second time with embeddings rounded differently. Change: two adapters of a run may differ
by less than rounding at each token, but not in sum. So the engine must show the learner's change since the previous
adapter, and since the base model without an adapter. The learner has measured this change twice, as d and e, with
independent rounding errors; c is the engine's scores minus the learner's old scores. The share of the change that the
engine shows is sum(c w) / sum(d w), where w is e with its largest values clipped. w is an instrumental variable
(Reiersol, 1941), so the share is 1 for the right weights regardless of rounding in learner and engine. It is 0 for the
previous weights, and about 2 for an adapter with twice the scale. Its standard error is White's (1980) under the right
weights: rounding moves the share many errors away from 1 as rarely as random signs sum to such a value. When the error
is large because the change is small against rounding, the proof is undecided, unless the change exceeds twice the
level's bound.
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
# Mean absolute gap in nats always tolerated, at any rounding that the learner measured. The float32 value allows for
# different kernels in deep models.
FLOORS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
ROUNDINGS = 3.0  # largest gap in units of the learner's rounding error; vLLM with SmolLM2-135M shows 0.5 to 1.3
MOST_GAP = 0.3  # nats; if rounding alone makes a gap this large, the gap proves nothing
TOLERANCE = 0.25  # |share - 1| always tolerated, however small the error is
ERRORS = 5.0  # |share - 1| in standard errors that proves different weights; rounding does it once in a million proofs
CLIP = 2.0  # largest |w| in medians, because a few tokens dominate both the change and the rounding


def make_probe(vocabulary: int) -> list[int]:
    """Returns 64 random token ids that no cache has seen; an equal vocabulary gives equal ids."""
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


def mean_gap(scores: Sequence[float], others: Sequence[float]) -> float:
    """Returns the mean |difference| in nats between two score lists for the same tokens."""
    assert len(scores) == len(others), (len(scores), len(others))
    return sum(abs(a - b) for a, b in zip(scores, others, strict=True)) / len(scores)


class Bound(NamedTuple):
    """Bounds on the gap in nats. Example: Bound(sure=0.15, most=0.15)"""

    sure: float  # a smaller gap is certainly rounding
    most: float  # a larger gap means different weights


def bound_of(dtype: str, probe: Probe) -> Bound:
    """Returns the bounds on `mean_gap` for an engine in this dtype."""
    floor = FLOORS.get(dtype, FLOORS["bfloat16"])
    rounding = mean_gap(probe.logprobs, probe.rounded) if probe.rounded else 0.0
    if dtype != "float32" and rounding < FLOORS["float32"]:  # no learner measured the rounding in this dtype
        return Bound(floor, MOST_GAP)
    most = max(floor, ROUNDINGS * rounding)
    return Bound(min(most, MOST_GAP), most)


class Twice(NamedTuple):
    """One policy's scores by its learner, in two roundings: [L - 1] logprobs each."""

    plain: list[float]
    rounded: list[float]


class ShownChange(NamedTuple):
    """The learner's change as an engine shows it. Example: ShownChange(share=0.98, error=0.03, resolution=0.1)"""

    share: float = nan
    error: float = inf  # standard error of the share
    resolution: float = inf  # standard error under share 0, the share of an engine with the old weights

    @property
    def is_wrong(self) -> bool:
        return abs(self.share - 1) > max(TOLERANCE, ERRORS * self.error)

    @property
    def is_decided(self) -> bool:
        """Whether the scores can tell the new weights from the old."""
        return self.is_wrong or ERRORS * max(self.error, self.resolution) <= 1

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % (+- {100 * max(self.error, self.resolution):.0f} %)"


def change_between(before: Twice, now: Twice, engine: Sequence[float]) -> ShownChange:
    """Returns how much of the learner's change the engine shows.

    The engine's rounding may match the learner's plain scores, as it does in the same process, but never the rounded
    scores.
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
    """The verdict on an engine's weights. They are right if both `wrong` and `undecided` are empty."""

    gap: float  # mean |engine - learner| in nats
    change: ShownChange  # since the newest reference; NaN without a reference
    wrong: str  # why these are different weights, or ""
    undecided: str  # why rounding could hide different weights, or ""


def judge(engine: Sequence[float], probe: Probe, references: Mapping[str, Twice], *, dtype: str) -> WeightVerdict:
    """Returns the verdict on an engine from its probe scores.

    `references` maps names to other policies' scores, newest last. References with the same scores as the current
    policy are skipped because they prove nothing.
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
            undecided.append(f"{text}, which is within rounding")
    return WeightVerdict(gap, change, ", ".join(wrong), "; ".join(undecided))


class _Engine(Protocol):
    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats for every token except the initial one."""


class ProvenPolicy(NamedTuple):
    """A policy confirmed by its engine's probe scores. Example: ProvenPolicy("9f3c...", {"probe_gap": 2e-6})"""

    digest: str
    numbers: dict[str, float]  # metrics of the proof


class WeightProof:
    """Proves each load of one engine, and keeps the previous load's probe for comparison."""

    def __init__(self) -> None:
        self._before: tuple[str, Probe] | None = None  # the previous load's name and probe
        self._has_logged = False

    async def prove(self, engine: _Engine, manifest: Manifest, origin: Origin) -> ProvenPolicy | None:
        """Returns the policy that the engine provably samples from; None when no learner left a probe.

        `origin` is the engine's current base, template and dtype. Raises DriftError if the scores come from different
        weights, CheckpointError if the chat template differs from the checkpoint's.
        """
        if manifest.origin is None or manifest.probe is None:
            return None
        if manifest.origin.template != origin.template:
            raise CheckpointError(
                f"step {manifest.step}: the chat template is not the one that it was trained with, and it would "
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
        """Returns the verdict with the largest gap among the engine's replicas; `found` has the scores of each.

        Raises DriftError if a replica has different weights. Only one undecided proof is logged per engine.
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
