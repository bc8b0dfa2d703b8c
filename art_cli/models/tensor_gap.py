"""The gap between a recomputed tensor file and the original, relative to how far training moved the tensors."""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open


def tensor_gap(found: Path, computed: Path, start: Path) -> float:
    """Returns |found - computed| / |computed - start|, with norms over all tensors in the safetensors files.

    Returns infinity if names, shapes or counters differ, if a file is damaged, or if an unmoved tensor differs.
    Tensors missing in `start` have moved from 0.
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
