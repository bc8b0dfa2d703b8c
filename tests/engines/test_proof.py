"""Weight proofs: right adapters pass in all dtypes, wrong adapters fail, and gaps within rounding are undecided.

The engine is a stand-in with the rounding of vLLM's fused kernels (tests/support/standins/fused_rounding.py).
benchmarks/attacks/weight_proof.py uses a real vLLM with a real model.
"""

import copy
import logging
import math
import random
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
import torch

from art_cli.engines.proof import Bound, Twice, WeightProof, WeightVerdict, bound_of, change_between, judge, mean_gap
from art_cli.learners.probe import LENGTH, NUM_TOKENS, NUM_TOKENS_FLOAT32, measure_probe
from art_cli.models.weights import Weights, clone_trainable, token_logprobs
from art_cli.runs.manifest import Manifest, Origin, Probe
from art_cli.runtime.errors import CheckpointError, DriftError
from tests.support.models.tiny import tiny_weights
from tests.support.standins.fused_rounding import fused_scores

DTYPES = ("float32", "bfloat16")
ORIGIN = Origin(base="b", template="t", dtype="bfloat16")
STEP = 0.02  # change of each number of B in a step, above rounding in bfloat16


def policy(dtype: str, *, lora_rank: int | None = 4) -> Weights:
    """A model of four layers whose base is in that dtype; the adapter stays float32, and changes nothing."""
    weights = tiny_weights(layers=4, hidden=64, lora_rank=lora_rank)
    for name, parameter in weights.model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(getattr(torch, dtype))
        elif "lora_B" in name:
            parameter.data.zero_()
    weights.dtype = getattr(torch, dtype)
    return weights


def moved(weights: Weights, *, seed: int, size: float = STEP) -> Weights:
    """Returns a copy whose B has moved by `size` per number, like Adam's initial step, in a seeded direction."""
    other, draw = clone_trainable(weights), torch.Generator().manual_seed(seed)
    for name, parameter in other.model.named_parameters():
        if "lora_B" in name:
            parameter.data += size * (2 * torch.randint(0, 2, parameter.shape, generator=draw) - 1)
    return other


def doubled(weights: Weights) -> Weights:
    other = clone_trainable(weights)
    for name, parameter in other.model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 2
    return other


def measured(weights: Weights, before: Probe | None = None) -> Probe:
    return measure_probe(weights, partial(token_logprobs, weights), before)


def check(proof: WeightProof, engine: Weights, probe: Probe, *, dtype: str, name: str = "") -> WeightVerdict:
    return proof.check([fused_scores(engine, probe.tokens)], probe, dtype=dtype, name=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_adapters_pass_and_are_decided(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """A run of six steps: the engine loads each, and shows 1 +- 0.25 of each change."""
    proof, weights = WeightProof(), policy(dtype)
    probe = measured(weights)
    check(proof, weights, probe, dtype=dtype, name="step 0")
    for step in range(1, 7):
        weights = moved(weights, seed=step)
        probe = measured(weights, probe)
        verdict = check(proof, weights, probe, dtype=dtype, name=f"step {step}")
        assert not verdict.undecided and abs(verdict.change.share - 1) < 0.25
        assert verdict.gap <= bound_of(dtype, probe).sure
    assert not caplog.records


WRONG: dict[str, Callable[[Weights, Weights, Weights], Weights]] = {  # of base, before, now
    "the step before": lambda base, before, now: before,
    "the base": lambda base, before, now: base,
    "another run": lambda base, before, now: moved(moved(base, seed=8), seed=9),
    "twice the scale": lambda base, before, now: doubled(now),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_adapters_fail(kind: str, dtype: str) -> None:
    base = policy(dtype)
    before = moved(base, seed=1)
    now = moved(before, seed=2)
    proof, probe = WeightProof(), measured(before)
    check(proof, before, probe, dtype=dtype, name="step 1")
    with pytest.raises(DriftError, match="step 2: the engine does not sample from the learner's weights"):
        check(proof, WRONG[kind](base, before, now), measured(now, probe), dtype=dtype, name="step 2")


@pytest.mark.parametrize("kind", ["the base", "another run", "twice the scale"])
def test_one_manifest_alone_tells_wrong_adapters(kind: str) -> None:
    """As in `art serve`: there is no previous load."""
    base = policy("bfloat16")
    before = moved(base, seed=1)
    now = moved(before, seed=2)
    with pytest.raises(DriftError, match="since the base model"):
        check(WeightProof(), WRONG[kind](base, before, now), measured(now), dtype="bfloat16")


def test_a_change_below_rounding_is_undecided_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Both the right adapter and the previous adapter pass, and the run continues."""
    caplog.set_level(logging.WARNING)
    before = moved(policy("bfloat16"), seed=1)
    now = moved(before, seed=2, size=1e-4)
    for engine in (now, before):
        proof, probe = WeightProof(), measured(before)
        check(proof, before, probe, dtype="bfloat16", name="step 1")
        for step in (2, 3):
            verdict = check(proof, engine, measured(now, probe), dtype="bfloat16", name=f"step {step}")
            if step == 2:
                assert "since step 1, which is within rounding" in verdict.undecided
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(text.startswith("step 2: the proof of the engine's weights is und") for text in said)


def test_a_change_above_twice_the_bound_is_decided_by_the_level_however_few_tokens_show_it() -> None:
    """One token of twenty moves by 0.1 nats: the share has an error of 1, and the mean change is 5 bounds."""
    still = [-1.0] * 19
    before, now = Twice([-2.0, *still], [-2.0, *still]), Twice([-1.9, *still], [-1.9, *still])
    probe = Probe(tokens=list(range(21)), logprobs=now.plain, rounded=now.rounded)
    assert not change_between(before, now, now.plain).is_decided
    right, stale = (judge(scores, probe, {"step 1": before}, dtype="float32") for scores in (now.plain, before.plain))
    assert not right.wrong and not right.undecided
    assert "gap 5.00e-03 nats, bound 1e-03" in stale.wrong


def test_the_smallest_step_is_proven_in_float32() -> None:
    """A thousandth of a step moves logprobs by less than the level's bound, and the change shows it."""
    before = moved(policy("float32"), seed=1)
    now, probe = moved(before, seed=2, size=STEP / 1000), measured(before)
    assert mean_gap(fused_scores(before, probe.tokens), measured(now, probe).logprobs) < bound_of("float32", probe).most
    proof = WeightProof()
    check(proof, before, probe, dtype="float32", name="step 1")
    right = copy.copy(proof)
    assert not check(right, now, measured(now, probe), dtype="float32").undecided
    with pytest.raises(DriftError, match="of the learner's change since step 1"):
        check(proof, before, measured(now, probe), dtype="float32")


class Fused:
    """An engine of two replicas with given weights."""

    def __init__(self, *replicas: Weights) -> None:
        self.replicas = replicas

    async def score(self, token_ids: list[int]) -> list[float]:
        return (await self.score_replicas(token_ids))[0]

    async def score_replicas(self, token_ids: list[int]) -> list[list[float]]:
        return [fused_scores(weights, token_ids) for weights in self.replicas]


async def test_each_replica_is_proven() -> None:
    weights = moved(policy("bfloat16"), seed=1)
    manifest = Manifest(step=3, base="b", config_hash="", origin=ORIGIN, probe=measured(weights))
    assert await WeightProof().prove(Fused(weights, weights), manifest, ORIGIN) is not None
    with pytest.raises(DriftError, match="step 3: vLLM's replica 2 does not sample"):
        await WeightProof().prove(Fused(weights, policy("bfloat16")), manifest, ORIGIN)


# --- the statistics ---------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, num: int, size: float) -> list[float]:
    """Rounding with heavy tails: Student's t with 3 degrees of freedom, of standard deviation `size`."""
    return [
        size * rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3) / math.sqrt(3)
        for _ in range(num)
    ]


def added(*parts: list[float]) -> list[float]:
    return [sum(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("engine_rounds", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 10.0])
def test_rounding_alone_is_never_called_wrong(engine_rounds: float, size: float) -> None:
    """100 correct loads each: changes sized in roundings, with engines whose rounding differs from the learner's."""
    rng = random.Random(0)
    for _ in range(100):
        old = drawn(rng, 255, 1.0)
        new = added(old, drawn(rng, 255, size * 0.05))
        before, now = (Twice(added(f, drawn(rng, 255, 0.05)), added(f, drawn(rng, 255, 0.05))) for f in (old, new))
        assert not change_between(before, now, added(new, drawn(rng, 255, 0.05 * engine_rounds))).is_wrong


def test_an_engine_that_rounds_as_the_learner_shows_the_whole_change() -> None:
    """As the embedded engine: its scores are the learner's, also where the change is only rounding."""
    rng = random.Random(2)
    for _ in range(100):
        before, now = (Twice(drawn(rng, 255, 1.0), drawn(rng, 255, 1.0)) for _ in range(2))
        assert not change_between(before, now, now.plain).is_wrong


def test_a_decided_proof_would_have_found_the_weights_before() -> None:
    """200 changes around the rounding: wherever the right load is decided, the stale one is wrong, or nearly."""
    rng, shares, decided = random.Random(1), [], 0
    for _ in range(100):
        old = drawn(rng, 255, 1.0)
        new = added(old, drawn(rng, 255, rng.uniform(0.01, 0.2)))
        before, now = (Twice(added(f, drawn(rng, 255, 0.05)), added(f, drawn(rng, 255, 0.05))) for f in (old, new))
        right, stale = (change_between(before, now, added(f, drawn(rng, 255, 0.05))) for f in (new, old))
        if right.is_decided:
            decided += 1
            shares.append(right.share)
            assert stale.is_wrong or abs(stale.share - 1) > 4 * stale.error
    assert decided > 40 and abs(sum(shares) / len(shares) - 1) < 0.02


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_text_is_the_models_own_and_is_kept() -> None:
    """The model's tokens are likelier than random ones, no generator of the process has moved, and a later probe has
    the same text and the base's scores."""
    weights = moved(policy("bfloat16"), seed=1)
    state = torch.get_rng_state()
    probe = measured(weights)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(probe.tokens) == NUM_TOKENS and len(probe.logprobs) == NUM_TOKENS - 1
    random_ids = torch.randint(0, 265, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(probe.logprobs[: LENGTH - 1]) > sum(token_logprobs(weights, random_ids)) + LENGTH / 2
    later = measured(moved(weights, seed=2), probe)
    assert (later.tokens, later.base, later.base_rounded) == (probe.tokens, probe.base, probe.base_rounded)
    base = policy("bfloat16")
    assert probe.base == pytest.approx(token_logprobs(base, probe.tokens), abs=1e-6)
    assert 0.001 < mean_gap(probe.logprobs, probe.rounded) < 0.1


def test_a_short_context_has_a_short_probe() -> None:
    weights = policy("float32", lora_rank=None)
    weights.max_length = 40
    probe = measured(weights)
    assert len(probe.tokens) == 39 and not probe.base
    assert len(measured(policy("float32")).tokens) == NUM_TOKENS_FLOAT32


def test_a_probe_of_an_older_version_is_read_and_bounded() -> None:
    probe = msgspec.json.decode(b'{"tokens": [7, 3, 41], "logprobs": [-3.6, -5.8]}', type=Probe)
    assert not judge([-3.6, -5.8005], probe, {}, dtype="float32").wrong
    assert judge([-3.6, -5.81], probe, {}, dtype="float32").wrong
    near = judge([-3.6, -5.75], probe, {}, dtype="bfloat16")
    assert not near.undecided and not near.wrong
    far = judge([-3.6, -5.5], probe, {}, dtype="bfloat16")
    assert far.undecided and not far.wrong
    assert judge([-3.6, -7.0], probe, {}, dtype="bfloat16").wrong


@pytest.mark.parametrize("scores", [[math.nan, -5.8], [-math.inf, -5.8]])
def test_scores_that_are_no_numbers_are_wrong(scores: list[float]) -> None:
    probe = Probe(tokens=[7, 3, 41], logprobs=[-3.6, -5.8], rounded=[-3.6, -5.81], base=[-3, -5], base_rounded=[-3, -5])
    assert judge(scores, probe, {"the base model": Twice(probe.base, probe.base_rounded)}, dtype="float32").wrong


def test_a_policy_trained_in_float32_and_served_in_bfloat16_is_undecided_by_its_level_alone() -> None:
    """Nobody has measured bfloat16's rounding on its probe: 0.05 nats are sure, up to 0.3 rounding may do."""
    probe = Probe(tokens=[7, 3, 41], logprobs=[-3.6, -5.8], rounded=[-3.6, -5.80001])
    assert bound_of("bfloat16", probe) == Bound(0.05, 0.3) and bound_of("float32", probe) == Bound(1e-3, 1e-3)


async def test_a_template_of_another_model_is_refused() -> None:
    weights = policy("float32")
    manifest = Manifest(
        step=3, base="b", config_hash="", origin=Origin(base="b", template="t"), probe=measured(weights)
    )
    with pytest.raises(CheckpointError, match="chat template"):
        await WeightProof().prove(Fused(weights), manifest, Origin(base="b", template="other", dtype="float32"))
    proven = await WeightProof().prove(Fused(weights), manifest, ORIGIN)
    assert proven is not None and proven.numbers["probe_gap"] < 1e-4 and proven.digest
