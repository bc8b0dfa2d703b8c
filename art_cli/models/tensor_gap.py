"""The gap of two files of tensors, one of which was computed again: their distance, by how far training moved."""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open


def tensor_gap(found: Path, computed: Path, start: Path) -> float:
    """Returns |found - computed| / |computed - start|, norms over all tensors of a safetensors file.

    Infinity if names, shapes or counters differ, if one file is damaged, or if a tensor differs that nothing moved. A
    tensor that `start` lacks has moved from 0.
    """
    apart = moved = 0.0
    try:
        with safe_open(found, "pt") as theirs, safe_open(computed, "pt") as ours, safe_open(start, "pt") as first:
            names, began = set(ours.keys()), set(first.keys())
            if set(theirs.keys()) != names:
                return math.inf
            for name in names:
                one, other = theirs.get_tensor(name), ours.get_tensor(name)
                if (one.shape, one.dtype) != (other.shape, other.dtype) or (not one.dim() and one != other):
                    return math.inf
                before = first.get_tensor(name).double() if name in began else 0.0
                apart += (one.double() - other.double()).square().sum().item()
                moved += (other.double() - before).square().sum().item() if one.dim() else 0.0
    except (SafetensorError, OSError):
        return math.inf
    gap = math.sqrt(apart / moved) if moved else math.inf * apart
    return gap if math.isfinite(gap) else (0.0 if apart == 0 else math.inf)
