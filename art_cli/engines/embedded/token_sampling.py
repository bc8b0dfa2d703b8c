"""Draws the next tokens of all sequences together, with per-sequence temperature, top_p, top_k and seed.

One uniform number decides a token (inverse of the cumulative distribution). The number is a hash of the sequence's seed
and the number of tokens sampled so far, so a seeded request draws the same tokens in any batch. The batch still changes
the last bits of the logits, because matrix products round differently by shape. A draw within rounding distance of a
boundary between two tokens can therefore differ.

Order, as in transformers and vLLM: biases and penalties, grammar, temperature, top_k, then top_p over the renormalized
rest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from art_cli.chat.requests import Sampling

Tensor = torch.Tensor
Seeds = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

BLOCK = 256  # vocabulary block size; probabilities are summed by block before by token
TOP = 256  # candidates tried for top_p before sorting the whole vocabulary


class Knobs(NamedTuple):
    """The sampling settings of n sequences, as arrays of n."""

    temperature: npt.NDArray[np.float32]  # 0: greedy
    top_p: npt.NDArray[np.float32]  # 1: off
    top_k: npt.NDArray[np.int64]  # 0: off
    seeds: Seeds
    num_sampled: npt.NDArray[np.int64]  # tokens sampled before this one

    def at(self, rows: npt.NDArray[np.int64]) -> "Knobs":
        return Knobs._make(part[rows] for part in self)


class Allowed(NamedTuple):
    """The m of n sequences that follow a grammar, and their allowed next tokens (at least one each)."""

    rows: npt.NDArray[np.int64]  # [m]
    tokens: npt.NDArray[np.bool_]  # [m, V]


class Reshaping:
    """Changes one sequence's logits before sampling, in vLLM's order: bias, barred stop tokens, penalties."""

    def __init__(self, settings: Sampling, prompt: Ints, ends: Ints) -> None:
        """`ends`: tokens that end the reply; they are barred before `min_tokens`."""
        self._settings, self._ends, self._prompt = settings, ends, np.unique(prompt)
        self._biased = np.array([token for token, _ in settings.logit_bias], np.int64)
        self._biases = torch.tensor([bias for _, bias in settings.logit_bias], dtype=torch.float32)

    def apply(self, logits: Tensor, sampled: Ints) -> None:
        """Changes `logits` [V] in place; `sampled`: the reply's tokens so far.

        Presence and frequency penalties count sampled tokens only; the repetition penalty counts prompt tokens too.
        """
        settings = self._settings
        logits[self._biased] += self._biases.to(logits.device)
        if len(sampled) < settings.min_tokens:
            logits[self._ends] = -torch.inf
        seen, counts = np.unique(sampled, return_counts=True)
        if settings.repetition_penalty != 1:
            ids = np.union1d(self._prompt, seen)
            old, penalty = logits[ids], settings.repetition_penalty
            logits[ids] = torch.where(old > 0, old / penalty, old * penalty)
        taken = settings.frequency_penalty * counts + settings.presence_penalty
        logits[seen] -= torch.from_numpy(taken.astype(np.float32)).to(logits.device)


class Drawn(NamedTuple):
    """Tokens drawn for n sequences. Logprobs are in nats."""

    ids: Tensor  # [n]
    logprobs: Tensor  # [n] under the sampling distribution (greedy: 0), ignoring the grammar
    raw_logprobs: Tensor  # [n] under softmax(logits)


def draw(logits: Tensor, knobs: Knobs, allowed: Allowed | None = None, reshaped: Tensor | None = None) -> Drawn:
    """Returns one token per row of float32 `logits` [n, V]. Raises FloatingPointError if they are not finite.

    Tokens are drawn from `reshaped`, the logits after biases and penalties, if given. The grammar is applied next.
    Logprobs are still computed without the grammar, because the learner computes and changes logprobs without it.
    """
    if logits.device.type == "mps":  # it has no float64
        logits, reshaped = logits.cpu(), None if reshaped is None else reshaped.cpu()
    raw = logits.logsumexp(-1)
    if not raw.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    shaped, whole = (logits, raw) if reshaped is None else (reshaped, reshaped.logsumexp(-1))
    temperature = torch.from_numpy(knobs.temperature).to(logits.device)
    greedy = knobs.temperature == 0
    uniform = torch.from_numpy(uniforms(knobs.seeds, knobs.num_sampled)).to(logits.device)
    if (knobs.temperature == 1).all():
        scaled, norm = shaped, whole
    else:
        scaled = shaped / torch.where(temperature == 0, 1.0, temperature)[:, None]
        norm = scaled.logsumexp(-1)
    ids, logprobs = _draw_whole(scaled, norm, uniform)
    is_cut = ((knobs.top_k > 0) | (knobs.top_p < 1)) & ~greedy
    if is_cut.any():
        rows = torch.from_numpy(np.flatnonzero(is_cut)).to(logits.device)
        ids[rows], logprobs[rows] = _draw_cut(
            scaled[rows],
            norm[rows],
            torch.from_numpy(knobs.top_k[is_cut]).to(logits.device),
            torch.from_numpy(knobs.top_p[is_cut]).to(logits.device),
            uniform[rows],
        )
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
        ids[rows], logprobs[rows] = shaped[rows].argmax(-1), 0.0
    if allowed is not None:
        rows = torch.from_numpy(allowed.rows).to(logits.device)
        ids[rows] = held = _draw_held(shaped, knobs, allowed)
        own = scaled[rows, held] - norm[rows]
        logprobs[rows] = torch.where(temperature[rows] == 0, torch.zeros_like(own), own)
    return Drawn(ids, logprobs, logits.gather(1, ids[:, None])[:, 0] - raw)


def top_logprobs(logits: Tensor, num: int, temperature: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Returns each row's `num` likeliest tokens, descending: logprobs [n, num] of softmax(logits / temperature), ids.

    top_p and top_k cut nothing here. Temperature 0 means softmax(logits).
    """
    scale = torch.from_numpy(np.where(temperature == 0, np.float32(1), temperature)).to(logits.device)
    scaled = logits / scale[:, None]
    values, ids = scaled.topk(num, dim=-1)
    return values - scaled.logsumexp(-1, keepdim=True), ids


def _draw_held(logits: Tensor, knobs: Knobs, allowed: Allowed) -> Tensor:
    """Returns [m] ids for the rows that follow a grammar.

    When few tokens are allowed, only these columns are computed, because exp(-inf) costs three times as much.
    """
    rows = torch.from_numpy(allowed.rows).to(logits.device)
    tokens = allowed.tokens
    columns = np.flatnonzero(tokens.any(axis=0))
    if 2 * len(columns) >= tokens.shape[1]:
        held = logits[rows].masked_fill_(torch.from_numpy(~tokens).to(logits.device), -torch.inf)
        return draw(held, knobs.at(allowed.rows)).ids
    ids = torch.from_numpy(columns).to(logits.device)
    others = torch.from_numpy(~tokens[:, columns]).to(logits.device)
    held = logits[rows[:, None], ids].masked_fill_(others, -torch.inf)
    return ids[draw(held, knobs.at(allowed.rows)).ids]


def _draw_whole(scaled: Tensor, norm: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution in two steps: vocabulary block, then token in the block.

    Block sums are accumulated in float64, which is exact enough for a vocabulary of 150k.
    """
    num, vocab = scaled.shape
    probs = (scaled - norm[:, None]).exp_()
    if vocab % BLOCK:
        probs = torch.nn.functional.pad(probs, (0, BLOCK - vocab % BLOCK))
    blocks = probs.view(num, -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)  # [n, V / BLOCK]
    point = uniform * sums[:, -1]
    block = torch.searchsorted(sums, point[:, None], right=True).clamp_(max=sums.shape[1] - 1)  # [n, 1]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(num, 1, BLOCK))[:, 0].double()
    column = _invert(inside, point - before[:, 0])
    ids = block[:, 0] * BLOCK + column
    return ids, scaled.gather(1, ids[:, None])[:, 0] - norm


def _draw_cut(scaled: Tensor, norm: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_draw_whole`, but samples each row from its fewest `top_k` likeliest tokens that reach `top_p`."""
    vocab = scaled.shape[1]
    top_k = torch.where(top_k == 0, vocab, top_k).clamp_(max=vocab)
    num = min(vocab, max(TOP, int(torch.where(top_k == vocab, 0, top_k).max())))
    values, ids = scaled.topk(num, dim=-1)
    probs = (values - norm[:, None]).double().exp_()
    open_ended = top_k > num  # top_k admits more than these candidates, so they must reach top_p by themselves
    if bool((open_ended & (probs.sum(-1) < top_p)).any()):
        values, ids = scaled.sort(-1, descending=True)
        probs = (values - norm[:, None]).double().exp_()
    rank = torch.arange(probs.shape[1], device=probs.device)
    admitted = torch.where(rank < top_k[:, None], probs, 0.0)
    whole = torch.where(top_k >= vocab, 1.0, admitted.sum(-1))
    reached = admitted.cumsum(-1) - admitted  # probability before each candidate
    kept = torch.where((reached < (top_p * whole)[:, None]) | (rank == 0), admitted, 0.0)
    total = kept.sum(-1)
    column = _invert(kept, uniform * total)[:, None]
    logprobs = kept.gather(1, column)[:, 0].log() - total.log()
    return ids.gather(1, column)[:, 0], logprobs.float()


def _invert(probs: Tensor, point: Tensor) -> Tensor:
    """Returns [n] smallest indices with cumulative probability above `point`, never an index with probability 0."""
    cumulative = probs.cumsum(-1)
    column = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]
    last = probs.shape[1] - 1 - (probs.flip(-1) > 0).byte().argmax(-1)  # rounding can overshoot the end
    return torch.minimum(column, last)


# --- noise ------------------------------------------------------------------------------------------------------------


def uniforms(seeds: Seeds, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns [n] numbers in [0, 1) hashed from seed and count: 53 bits of SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_of(seed: int, index: int) -> int:
    """Returns the seed for a request's choice number `index`. It does not depend on the number of choices."""
    # `_mix` for a Python integer, ten times cheaper than for an array
    state = (seed + index * 0xD1B54A32D192ED03) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def _mix(state: Seeds) -> Seeds:
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
