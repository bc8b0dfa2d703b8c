"""Drawing tokens: the frequencies, the reported logprobs and the noise, each against a reference."""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from art_cli.engines.embedded import token_sampling as sampling
from art_cli.engines.embedded.token_sampling import Drawn, Knobs, draw, seed_of, top_logprobs, uniforms

NUM = 20_000


def knobs(num: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> Knobs:
    """`num` rows from a single request: the same seed with increasing counts."""
    return Knobs(
        np.full(num, temperature, np.float32),
        np.full(num, top_p, np.float32),
        np.full(num, top_k, np.int64),
        np.full(num, seed_of(seed, 0), np.uint64),
        np.arange(num),
    )


def draw_many(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Drawn:
    """NUM draws from one row of logits, a thousand at a time."""
    whole = knobs(NUM, temperature, top_p, top_k)
    parts = [
        draw(logits.expand(1000, -1), Knobs(*(part[start : start + 1000] for part in whole)))
        for start in range(0, NUM, 1000)
    ]
    return Drawn(*map(torch.cat, zip(*parts, strict=True)))


def reference(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """[V] logprobs of the distribution that transformers would sample from; -inf where it never does."""
    row = logits[None].double()
    row = TemperatureLogitsWarper(temperature)(None, row)
    if top_k:
        row = TopKLogitsWarper(top_k)(None, row)
    if top_p < 1:
        row = TopPLogitsWarper(top_p)(None, row)
    return row[0].log_softmax(-1)


def random_logits(vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


CUTS = [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.7, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 5), (0.8, 0.7, 12), (1.3, 0.95, 290)]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), CUTS)
@pytest.mark.parametrize("vocab", [40, 600])
def test_frequencies_are_those_of_the_distribution(temperature: float, top_p: float, top_k: int, vocab: int) -> None:
    """Pearson's chi-square of 20k draws, tokens expected fewer than 5 times taken together.

    With d degrees of freedom the statistic has mean d and variance 2d: below d + 5 sqrt(2d) for a right sampler.
    """
    logits = random_logits(vocab)
    drawn = draw_many(logits, temperature, top_p, top_k)
    expected = reference(logits, temperature, top_p, top_k).exp() * NUM
    counts = torch.bincount(drawn.ids, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1)).sum().item()
    degrees = len(counts) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), CUTS)
def test_logprobs_are_of_the_distribution_drawn_from(temperature: float, top_p: float, top_k: int) -> None:
    """Equal to transformers' cuts in float64, renormalised: over all tokens that can come they sum to one."""
    logits = random_logits(300, seed=3)
    drawn = draw_many(logits, temperature, top_p, top_k)
    expected = reference(logits, temperature, top_p, top_k)
    assert torch.allclose(drawn.logprobs.double(), expected[drawn.ids], atol=1e-5)
    assert torch.allclose(drawn.raw_logprobs, logits.log_softmax(-1)[drawn.ids], atol=1e-5)
    seen = {int(id): float(logprob) for id, logprob in zip(drawn.ids, drawn.logprobs, strict=True)}
    never = expected.exp().sum() - expected[list(seen)].exp().sum()
    assert sum(np.exp(list(seen.values()))) + float(never) == pytest.approx(1.0, abs=1e-5)


def test_a_wide_flat_distribution_is_cut_where_it_reaches_top_p() -> None:
    """5,000 equal tokens, top_p 0.5: the first 2,500 of the order come, each with logprob -ln 2500."""
    logits = torch.zeros(5000)
    drawn = draw(logits.expand(200, 5000), knobs(200, top_p=0.5))
    assert torch.allclose(drawn.logprobs, torch.full((200,), -np.log(2500.0), dtype=torch.float32), atol=1e-3)


def test_temperature_zero_takes_the_likeliest() -> None:
    """Greedy draws are certain: logprob 0 under the sampling distribution, raw log_softmax(logits)."""
    logits = torch.stack([random_logits(100, seed) for seed in range(8)])
    drawn = draw(logits, knobs(8, temperature=0.0, top_p=0.5, top_k=3))
    assert drawn.ids.tolist() == logits.argmax(-1).tolist()
    assert drawn.logprobs.tolist() == [0.0] * 8
    assert torch.allclose(drawn.raw_logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


def test_each_row_has_its_own_knobs() -> None:
    """A mixed batch draws row by row what each row draws alone."""
    logits = torch.stack([random_logits(500, seed) for seed in range(6)])
    mixed = Knobs(
        np.array([1.0, 0.0, 0.7, 1.0, 2.0, 1.0], np.float32),
        np.array([1.0, 1.0, 0.9, 0.3, 1.0, 1.0], np.float32),
        np.array([0, 0, 0, 50, 7, 0]),
        np.array([seed_of(seed, 0) for seed in range(6)], np.uint64),
        np.array([3, 1, 4, 1, 5, 9]),
    )
    together = draw(logits, mixed)
    for row in range(6):
        alone = draw(logits[row : row + 1], Knobs(*(part[row : row + 1] for part in mixed)))
        assert alone.ids[0] == together.ids[row]
        assert alone.logprobs[0] == pytest.approx(float(together.logprobs[row]), abs=1e-6)


def test_a_token_of_probability_zero_never_comes() -> None:
    """All mass on the last of 257 tokens, the first block of 256 empty; and the uniform numbers reach up to 1."""
    logits = torch.full((257,), float("-inf"))
    logits[256] = 0.0
    drawn = draw(logits.expand(500, 257), knobs(500))
    assert set(drawn.ids.tolist()) == {256}
    assert drawn.logprobs.abs().max() == 0


def test_the_noise_is_uniform_and_of_seed_and_count_alone() -> None:
    """Kolmogorov's distance of n = 20k uniforms is below 1.95 / sqrt(n) (p = 0.001), along counts and along seeds."""
    seeds, counts = np.arange(NUM).astype(np.uint64), np.arange(NUM)
    one, many = np.uint64(seed_of(5, 0)), np.array([seed_of(seed, 0) for seed in range(NUM)], np.uint64)
    for sample in (
        uniforms(np.full(NUM, one), counts),
        uniforms(many, np.zeros(NUM, np.int64)),
        uniforms(seeds, counts),
    ):
        distance = np.abs(np.sort(sample) - (np.arange(NUM) + 0.5) / NUM).max()
        assert distance < 1.95 / NUM**0.5
        assert sample.min() >= 0 and sample.max() < 1
    correlation = np.corrcoef(uniforms(many, counts * 0)[:-1], uniforms(many, counts * 0)[1:])[0, 1]
    assert abs(correlation) < 4 / NUM**0.5


def test_seeds_of_several_answers_differ_and_the_first_is_that_of_one_answer() -> None:
    seeds = {seed_of(seed, index) for seed in (-3, 0, 1, 2**63 - 1) for index in range(8)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_top_logprobs_are_the_likeliest_tokens_at_the_temperature_they_are_drawn_at() -> None:
    """Each row under softmax(logits / temperature); the final row is greedy and uses softmax(logits)."""
    logits = torch.stack([random_logits(50, seed) for seed in range(4)])
    values, ids = top_logprobs(logits, 4, np.array([1, 0.5, 2, 0], np.float32))
    expected = (logits / torch.tensor([1, 0.5, 2, 1])[:, None]).log_softmax(-1).sort(-1, descending=True)
    assert torch.allclose(values, expected.values[:, :4], atol=1e-6)
    assert ids.tolist() == expected.indices[:, :4].tolist()


def test_the_seed_of_a_choice_is_mixed_as_the_noise_is() -> None:
    """SplitMix64 of the request's seed plus the choice's number of steps, once with numpy's 64-bit integers."""
    seeds = [0, 1, 12345, 2**63 + 7, 2**64 - 1, -5]
    for index in (0, 1, 77):
        with np.errstate(over="ignore"):
            step = np.uint64(index) * np.uint64(0xD1B54A32D192ED03)
            mixed = sampling._mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + step)
        assert [sampling.seed_of(seed, index) for seed in seeds] == mixed.tolist()
