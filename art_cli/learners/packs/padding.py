"""Packs padded to few sizes, because a CPU's products write code for each size that they meet (decoder/products.py).

The padding is one more tree behind the others. Nothing of it is trained and no sample's token sees it.
"""

from dataclasses import replace

import numpy as np

from art_cli.learners.packs.packing import Pack, Segments
from art_cli.learners.samples import Ints

SMALLEST = 8  # every size is a multiple of it


def round_up(num: int) -> int:
    """Returns the next of eight sizes per doubling: 8, 16, ... 128, 144, ... 256, 288, ... 512, 576, ..."""
    step = max(SMALLEST, 2 ** ((num - 1).bit_length() - 4)) if num > 1 else SMALLEST
    return -(-num // step) * step


def padded(pack: Pack) -> Pack:
    """Returns the pack with its last token repeated behind it as one more segment, up to the next size."""
    length = len(pack.token_ids)
    num = round_up(length) - length
    if num == 0:
        return pack
    starts, ends, reaches, parents = pack.segments
    end = length + num
    return replace(
        pack,
        token_ids=np.pad(pack.token_ids, (0, num), mode="edge"),
        depths=np.concatenate([pack.depths, np.arange(num)]),
        segments=Segments([*starts, length], [*ends, end], [*reaches, end], [*parents, -1]),
    )


def padded_rows(positions: Ints, length: int) -> Ints:
    """Returns ascending positions of a pack of `length` tokens, with other ones up to the next size."""
    num = min(round_up(len(positions)), length) - len(positions)
    others = np.setdiff1d(np.arange(length), positions, assume_unique=True)[:num]
    return np.sort(np.concatenate([positions, others]))
