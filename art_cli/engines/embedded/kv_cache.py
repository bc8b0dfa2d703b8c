"""Keys and values of every slot: one slab per layer, `[slots, heads, length, head_dim]`, grown as needed.

It knows nothing of sequences. A slot's content beyond its computed tokens is left over from earlier sequences. It is
finite, never uninitialised memory, and attention masks it.
"""

import torch

from art_cli.engines.embedded.scheduler import Copy, Shape

Tensor = torch.Tensor


class SlotCache:
    """A layer's slabs are made at its first write, with the heads and dtype of the states written."""

    def __init__(self) -> None:
        self.shape = Shape(0, 0)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def resize(self, shape: Shape) -> None:
        """Gives each slab that shape and keeps the common part. One layer at a time, to save memory."""
        if shape == self.shape:
            return
        self.shape = shape
        for slabs in (self.keys, self.values):
            for layer, old in slabs.items():
                new = old.new_zeros(shape.slots, old.shape[1], shape.length, old.shape[3])
                slots, length = min(old.shape[0], shape.slots), min(old.shape[2], shape.length)
                new[:slots, :, :length] = old[:slots, :, :length]
                slabs[layer] = new

    def copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            for slabs in (self.keys, self.values):
                for slab in slabs.values():
                    copied = slab[copy.source, :, : copy.length]
                    for target in copy.targets:  # one by one, which takes half the time of one call with indices
                        slab[target, :, : copy.length] = copied

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Writes key and value `[T, heads, head_dim]` of each token and head into these rows of the slab."""
        if layer not in self.keys:
            self.keys[layer] = self._slab(key)
            self.values[layer] = self._slab(value)
        for slab, states in ((self.keys[layer], key), (self.values[layer], value)):
            slab.view(-1, slab.shape[3]).index_copy_(0, rows, states.reshape(-1, slab.shape[3]))

    def clear(self) -> None:
        """Frees all slabs."""
        self.keys.clear()
        self.values.clear()

    def _slab(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.shape.slots, states.shape[1], self.shape.length, states.shape[2])
