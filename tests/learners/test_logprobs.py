"""Logprobs in chunks: what log-softmax over the whole matrix gives, forward and backward, in float32."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from art_cli.learners.packs.logprobs import _rows_per_chunk, token_scores

E, H, V = 23, 8, 50


def make(head: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(E, H, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(V, (E,), generator=generator)
    temperatures = torch.where(torch.arange(E) % 2 == 0, 1.0, 0.6)
    return hidden, head.to(dtype), targets, temperatures


class Adapted(nn.Module):
    """A head with an adapter of its own: no single weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(H, V), nn.Linear(H, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


@pytest.mark.parametrize("chunk_logits", [1, 7 * V, 10**9])
@pytest.mark.parametrize(
    "head", [nn.Linear(H, V, bias=False), nn.Linear(H, V), Adapted()], ids=lambda h: type(h).__name__
)
def test_equal_the_whole_matrix_forward_and_backward(head: nn.Module, chunk_logits: int) -> None:
    """Any chunking; gradients of the hidden states and of the head's own parameters."""
    hidden, head, targets, temperatures = make(head)
    head.zero_grad()
    weight = torch.linspace(-1, 2, E)
    scores = token_scores(hidden, head, targets, temperatures, chunk_logits=chunk_logits)
    inputs = [hidden, *head.parameters()]
    ours = torch.autograd.grad((scores.logprobs * weight).sum(), inputs)
    assert all(each.grad is None for each in inputs), "threads that ask for their gradients would share it"
    logits = head(hidden)
    tempered = (logits / temperatures[:, None]).log_softmax(-1)
    logprobs = tempered.gather(1, targets[:, None])[:, 0]
    (logprobs * weight).sum().backward()
    torch.testing.assert_close(scores.logprobs, logprobs)
    torch.testing.assert_close(scores.entropies, -(tempered.exp() * tempered).sum(-1))
    torch.testing.assert_close(scores.raw_logprobs, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    for gradient, expected in zip(ours, [each.grad for each in inputs], strict=True):
        torch.testing.assert_close(gradient, expected)


def test_closed_form() -> None:
    """Logits 0 and log 3. Target 1: log 3/4 at temperature 1; at 1/2 they are 0 and log 9: log 9/10."""
    head = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))
    scores = token_scores(torch.ones(2, 1), head, torch.tensor([1, 1]), torch.tensor([1.0, 0.5]))
    assert scores.logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.9)])
    assert scores.raw_logprobs.tolist() == pytest.approx([math.log(0.75)] * 2)
    assert float(scores.entropies[0]) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_log_softmax_is_float32_under_a_bfloat16_model() -> None:
    """Contract 3: equal, to float32's rounding, to log-softmax of the model's own bfloat16 logits."""
    hidden, head, targets, temperatures = make(nn.Linear(H, V), torch.bfloat16)
    scores = token_scores(hidden, head, targets, temperatures)
    exact = (head(hidden).double() / temperatures[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    scores.logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_never_holds_more_logits_than_a_chunk() -> None:
    """The head is never asked for more rows at once, forward or backward."""
    sizes = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    hidden, head, targets, temperatures = make(Counting(H, V))
    token_scores(hidden, head, targets, temperatures, chunk_logits=5 * V).logprobs.sum().backward()
    assert sizes == [5, 5, 5, 5, 3] * 2


def test_no_rows_give_empty_scores() -> None:
    scores = token_scores(torch.empty(0, H), nn.Linear(H, V), torch.empty(0, dtype=torch.long), torch.empty(0))
    assert [len(column) for column in scores[:3]] == [0, 0, 0] and scores.values is None


@pytest.mark.parametrize(("device", "rows"), [("cpu", 128), ("cuda", 883), ("cuda:1", 883), ("mps", 128)])
def test_a_gpu_takes_more_rows_at_a_time(device: str, rows: int) -> None:
    """A vocabulary of 151,936: 2^27 / 151,936 is 883.4; a CPU's 2^22 would be 27 rows, and 128 is the least."""
    hidden: Any = SimpleNamespace(device=torch.device(device))
    assert _rows_per_chunk(hidden, nn.Linear(1, 151_936, bias=False, device="meta"), None) == rows
