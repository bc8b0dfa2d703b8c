"""The value head: one linear layer that reads a critic's value from the policy's last hidden state. float32."""

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """V(s) = w . h / sqrt(H) + b of a state whose last token has the hidden state h [H], in units of the reward.

    Zero at first. Hidden states have entries of about 1 in a model of any width, so without the division the first
    updates of a wide model would move its values by much more than those of a narrow one.
    """

    def __init__(self, width: int, *, moves_trunk: bool, device: torch.device) -> None:
        """`moves_trunk`: whether the gradient of the values goes on into the policy's own weights."""
        super().__init__()
        self.moves_trunk, self.scale = moves_trunk, width**-0.5
        self.weight = torch.nn.Parameter(torch.zeros(width, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [E] the values of states whose last tokens have the `hidden` states [E, H], of any dtype."""
        seen = hidden if self.moves_trunk else hidden.detach()
        values: Tensor = (seen.float() * self.scale) @ self.weight + self.bias
        return values

    @torch.no_grad()
    def reset(self) -> None:
        """Sets it back to zero."""
        for parameter in self.parameters():
            parameter.zero_()
