"""Logprobs and entropies of chosen tokens, without holding the logits for all tokens. Computed in float32.

E rows, H hidden, V vocabulary. The [E, V] logits exist only in chunks of n rows. With a frozen head, a row's gradient
is one number times a known vector, so the forward pass keeps the vectors, [n, H] per chunk. With a trained head, the
backward pass recomputes the chunk's logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Logits per chunk, by device. On a CPU, 16 MiB stay in the caches. On a GPU 512 MiB (883 rows for a 152k vocabulary),
# because each chunk reads the whole head twice (1.2 GB at width 4,096). Peak memory is about three times as much:
# logits, exponentials and slope.
CHUNK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}
CHUNK_ROWS = 128  # minimum rows per chunk; with fewer rows, a matmul reads the whole head for too little work

Head = Callable[[Tensor], Tensor]  # [n, H] -> [n, V] logits; any module: linear, tied, with bias or adapter


class TokenScores(NamedTuple):
    logprobs: Tensor  # [E] nats, log p of the targets under softmax(logits / temperature); carries the gradient
    entropies: Tensor  # [E] nats, entropy of the same distribution; detached
    raw_logprobs: Tensor  # [E] nats, log p of the targets under softmax(logits); detached
    values: Tensor | None = None  # [E] the critic's value before each target; None without critic


def token_scores(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_logits: int | None = None,
) -> TokenScores:
    """Scores `targets` [E] given `hidden` [E, H] and positive `temperatures` [E]. Zero rows give empty tensors.

    log p(x) = z_x / t - log sum_v exp(z_v / t), with gradient (1[v = x] - p_v) / t for z_v. The head's parameters also
    get gradients. Example: logits 0 and log 3, target 1, t = 1 give log 3/4. Pass the temperatures on the CPU to avoid
    a GPU synchronization.
    """
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    trained = [p for p in head.parameters() if p.requires_grad] if isinstance(head, torch.nn.Module) else []
    is_frozen = isinstance(head, torch.nn.Module) and not trained
    rows = _rows_per_chunk(hidden, head, chunk_logits)
    if wants_gradient and is_frozen:
        return TokenScores(*_FrozenHead.apply(hidden, head, targets, temperatures, rows))  # type: ignore[no-untyped-call]
    given = (hidden, head, targets, temperatures, rows, *trained)
    return TokenScores(*_TrainedHead.apply(*given))  # type: ignore[no-untyped-call]


class _TrainedHead(torch.autograd.Function):
    """Recomputes a chunk's logits in the backward pass. Also used without gradients.

    The head's trained parameters are inputs, so autograd returns their gradients like all others. Otherwise several
    threads would add to `.grad` concurrently.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        temperatures: Tensor,
        rows: int,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = _Scores(hidden, temperatures)
        temperatures = scores.temperatures
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            scores.fill(chunk, head(hidden[chunk]).float(), targets[chunk])
        ctx.save_for_backward(hidden, targets, temperatures, scores.log_sums)
        ctx.head, ctx.trained, ctx.rows, ctx.is_tempered = head, trained, rows, scores.is_tempered
        ctx.mark_non_differentiable(scores.entropies, scores.raw_logprobs)
        return scores.logprobs, scores.entropies, scores.raw_logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, targets, temperatures, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        scaled = grad / temperatures
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            with torch.enable_grad():
                leaf = hidden[chunk].detach().requires_grad_()
                logits = ctx.head(leaf)
            # slope = (1[v = target] - p) * grad / temperature, computed in place
            slope = logits.detach().float()
            if ctx.is_tempered:
                slope.div_(temperatures[chunk, None])
            slope.sub_(log_sums[chunk, None])  # log p
            slope.exp_().mul_(-scaled[chunk, None])
            slope.scatter_add_(1, targets[chunk, None], scaled[chunk, None])
            inputs = [leaf, *ctx.trained]
            grad_hidden[chunk], *parts = torch.autograd.grad(logits, inputs, slope.to(logits.dtype), allow_unused=True)
            pairs = zip(sums, parts, strict=True)
            sums = [before if part is None else part if before is None else before.add_(part) for before, part in pairs]
        return grad_hidden, None, None, None, None, *sums


class _FrozenHead(torch.autograd.Function):
    """Computes each row's logprob gradient in the forward pass; the backward pass only scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, targets: Tensor, temperatures: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = _Scores(hidden, temperatures)
        temperatures, slopes = scores.temperatures, torch.empty_like(hidden)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            with torch.enable_grad():
                leaf = hidden[chunk].detach().requires_grad_()
                logits = head(leaf)
            # float32 logits are changed in place, because the head's backward does not need its output
            exponentials, sums = scores.fill(chunk, logits.detach().float(), targets[chunk])
            inverse = temperatures[chunk, None].reciprocal()
            slope = exponentials.mul_(-inverse / sums[:, None]).scatter_add_(1, targets[chunk, None], inverse)
            [slopes[chunk]] = torch.autograd.grad(logits, leaf, slope.to(logits.dtype))
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(scores.entropies, scores.raw_logprobs)
        return scores.logprobs, scores.entropies, scores.raw_logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        [slopes] = ctx.saved_tensors
        return (slopes * grad[:, None]).to(slopes.dtype), None, None, None, None


class _Scores:
    """Scores for E rows, filled chunk by chunk."""

    def __init__(self, hidden: Tensor, temperatures: Tensor) -> None:
        self.logprobs, self.entropies, self.raw_logprobs, self.log_sums = torch.empty(
            4, len(hidden), device=hidden.device
        )
        self.is_tempered = bool((temperatures != 1).any())  # synchronizes with the temperatures' device
        self.temperatures = temperatures.to(hidden.device)

    def fill(self, chunk: slice, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [n, V] exp(logits / temperature - row maximum) and [n] the row sums. Consumes `logits` [n, V]."""
        if self.is_tempered:
            self.raw_logprobs[chunk] = _pick(logits, targets) - logits.logsumexp(-1)
            logits.div_(self.temperatures[chunk, None])
        largest = logits.amax(-1)
        logits.sub_(largest[:, None])  # the maximum is now 0
        chosen = _pick(logits, targets)
        exponentials = logits.exp()
        sums = exponentials.sum(-1)
        log_sum = sums.log()
        self.logprobs[chunk] = chosen - log_sum
        self.entropies[chunk] = log_sum - _row_dots(exponentials, logits) / sums
        self.log_sums[chunk] = log_sum + largest
        if not self.is_tempered:
            self.raw_logprobs[chunk] = self.logprobs[chunk]
        return exponentials, sums


def _pick(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(1, targets[:, None])[:, 0]


def _row_dots(left: Tensor, right: Tensor) -> Tensor:
    """Returns [n] row-wise dot products, without an [n, V] product in memory."""
    return torch.bmm(left[:, None, :], right[:, :, None])[:, 0, 0]


def _rows_per_chunk(hidden: Tensor, head: Head, chunk_logits: int | None) -> int:
    """Returns the number of rows per chunk; the head's output determines their width."""
    width = int(getattr(head, "out_features", None) or head(hidden[:1]).shape[-1])
    if chunk_logits is not None:
        return max(1, chunk_logits // width)
    return max(CHUNK_ROWS, CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS["cpu"]) // width)
