"""Datums: token sequences whose loss a client weighs itself, and the packs that compute them. Numpy only.

A datum's rows are shifted by one already: its targets at row i are predicted from its inputs up to and with row i. A
row has K targets, usually one, and they need not be the next input, because a client may ask about any token.

    inputs 5 6 7    targets 6 7 8    the sequence 5 6 7 8, trained on its last three tokens
    inputs 5 6 7    targets 6 9 8    the 9 is predicted after 5 6, and the 7 follows there all the same

A client may leave rows out. Then the packs of its data are those of the torch learner's samples, whose prompts are not
trained on either, and so are the sums in them, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from art_cli.learners.packs.packing import Edges, Pack
from art_cli.learners.samples import Ints, Sample, bare_sample
from art_cli.learners.token_weights import Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class Datum:
    """One sequence of n rows with K targets each.

    Example: Datum(inputs=[5 6 7], targets=[[6] [7] [8]], numbers={"weights": [[0.0] [1.0] [1.0]]})
    """

    inputs: Ints  # [n] token ids
    targets: Ints  # [n, K] token ids
    numbers: Mapping[str, Floats]  # [n, K] by name, as the loss needs them: weights, advantages, logprobs
    rows: Ints | None = None  # [m] ascending rows that are computed, at least one; None means all

    @property
    def computed(self) -> Ints:
        """[m] the rows that are computed."""
        return np.arange(len(self.inputs)) if self.rows is None else self.rows

    def numbers_of(self, name: str) -> Floats:
        """Returns [m * K] the numbers of that name in the computed rows."""
        return (self.numbers[name] if self.rows is None else self.numbers[name][self.rows]).ravel()

    @property
    def num_terms(self) -> int:
        return self.targets.size if self.rows is None else self.targets.shape[1] * len(self.rows)

    def whole(self, values: Floats) -> Floats:
        """Returns [n, K] values of the computed rows among all rows; the others have 0."""
        if self.rows is None:
            return values.reshape(self.targets.shape)
        found = np.zeros(self.targets.shape, values.dtype)
        found[self.rows] = values.reshape(len(self.rows), -1)
        return found


class DatumPack(NamedTuple):
    """A pack and its N terms, datum after datum, row after row."""

    pack: Pack
    edge_of: Ints  # [N] index of the edge that predicts each term
    datum_of: Ints  # [N] index of each term's datum among all that were packed
    order: list[int]  # the indexes of the pack's datums, in the order of its terms


def datum_samples(data: Sequence[Datum]) -> list[Sample]:
    """Returns the datums as samples to pack. The last token of each only makes room for the last row's prediction."""
    return [
        bare_sample(
            np.concatenate([datum.inputs, datum.targets[-1, :1]]),
            datum.computed + 1,
            f"datum {number}",
            turn=number,
        )
        for number, datum in enumerate(data)
    ]


def ask_for_targets(pack: Pack, data: Sequence[Datum]) -> DatumPack:
    """Returns the pack of `datum_samples` with edges that predict the datums' targets instead of the next tokens."""
    order = [sample.turn for sample in pack.samples]
    if all(_asks_for_next(data[sample.turn], sample) for sample in pack.samples):
        return DatumPack(pack, pack.terms.edges, np.array(order)[pack.terms.samples], order)
    repeats = np.concatenate([np.full(len(data[index].computed), data[index].targets.shape[1]) for index in order])
    places = np.repeat(pack.edges.positions[pack.terms.edges], repeats)
    targets = np.concatenate([data[index].targets[data[index].computed].ravel() for index in order])
    both, edge_of = np.unique(np.stack([places, targets]), axis=1, return_inverse=True)
    edges = Edges(both[0].copy(), both[1].copy(), np.ones(both.shape[1]))
    datum_of = np.concatenate([np.full(data[index].num_terms, index) for index in order])
    return DatumPack(replace(pack, edges=edges), edge_of.ravel(), datum_of, order)


def _asks_for_next(datum: Datum, sample: Sample) -> bool:
    """Returns whether each computed row has one target, the token that follows in the sample."""
    rows = sample.targets - 1
    return datum.targets.shape[1] == 1 and bool((datum.targets[rows, 0] == sample.token_ids[sample.targets]).all())
