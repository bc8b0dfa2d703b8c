"""Logprobs and entropies of chosen tokens, without ever holding logits for all of them. float32 whatever the model is.

E rows, H hidden, V vocabulary: the [E, V] logits exist in chunks only, and are computed again in the backward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_LOGITS = (
    1 << 24
)  # logits held at once: 64 MiB in float32, small beside a model, large enough for full-speed matmul

Head = Callable[
    [Tensor], Tensor
]  # [n, H] -> [n, V] logits, a module: linear, tied, with a bias or an adapter of its own


class TokenScores(NamedTuple):
    logprobs: Tensor  # [E] of the targets under softmax(logits / temperature), nats; carries the gradient
    entropies: Tensor  # [E] of that distribution, nats; detached
    raw_logprobs: Tensor  # [E] of the targets under softmax(logits), nats; detached


def token_scores(
    hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor, *, chunk_logits: int = CHUNK_LOGITS
) -> TokenScores:
    """Scores of `targets` [E] given `hidden` [E, H]; `temperatures` [E] positive. No rows give empty tensors.

    log p(x) = z_x / t - log sum_v exp(z_v / t), its gradient by z_v: (1[v = x] - p_v) / t. The head's own parameters
    get their gradients too. logits 0 and log 3, target 1, t = 1: log 3/4.
    """
    return TokenScores(*_TokenScores.apply(hidden, head, targets, temperatures, chunk_logits))  # type: ignore[no-untyped-call]


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor, chunk_logits: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropies, raw_logprobs, log_sums = torch.empty(4, len(hidden), device=hidden.device)
        is_tempered = bool((temperatures != 1).any())
        rows = _rows_per_chunk(hidden, head, chunk_logits)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = head(hidden[chunk]).float()
            if is_tempered:
                raw_logprobs[chunk] = _pick(logits, targets[chunk]) - logits.logsumexp(-1)
                logits.div_(temperatures[chunk, None])
            largest = logits.amax(-1)
            logits.sub_(largest[:, None])  # shifted: the largest is 0
            chosen = _pick(logits, targets[chunk])
            exponentials = logits.exp()
            sums = exponentials.sum(-1)
            log_sum = sums.log()
            logprobs[chunk] = chosen - log_sum
            entropies[chunk] = log_sum - _row_dots(exponentials, logits) / sums
            log_sums[chunk] = log_sum + largest
        if not is_tempered:
            raw_logprobs.copy_(logprobs)
        ctx.save_for_backward(hidden, targets, temperatures, log_sums)
        ctx.head, ctx.rows, ctx.is_tempered = head, rows, is_tempered
        ctx.mark_non_differentiable(entropies, raw_logprobs)
        return logprobs, entropies, raw_logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, targets, temperatures, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        scaled = grad / temperatures
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            with torch.enable_grad():
                leaf = hidden[chunk].detach().requires_grad_()
                logits = ctx.head(leaf)
            # in place: -p, then + 1 at the target, both times grad / temperature
            slope = logits.detach().float()
            if ctx.is_tempered:
                slope.div_(temperatures[chunk, None])
            slope.sub_(log_sums[chunk, None]).exp_().mul_(-scaled[chunk, None])
            slope.scatter_add_(1, targets[chunk, None], scaled[chunk, None])
            logits.backward(slope.to(logits.dtype))
            grad_hidden[chunk] = leaf.grad
        return grad_hidden, None, None, None, None


def _pick(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0]


def _row_dots(left: Tensor, right: Tensor) -> Tensor:
    """[n] the dot product of each row with its counterpart, without a product matrix of their size."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]


def _rows_per_chunk(hidden: Tensor, head: Head, chunk_logits: int) -> int:
    """How many rows' logits may be held at once; the head says how wide they are."""
    width = getattr(head, "out_features", None) or head(hidden[:1]).shape[-1]
    return max(1, chunk_logits // int(width))
