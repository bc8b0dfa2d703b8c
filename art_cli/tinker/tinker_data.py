"""Samples as a server of the Tinker protocol takes them, and the logprobs and norms out of its answers. No torch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from art_cli.learners.samples import Sample
from art_cli.learners.token_weights import Floats
from art_cli.runtime.errors import RemoteError

# numbers that a datum may bring beside its loss's, where the server's capabilities name them (server/passes.py)
MASK, SHARES = "mask", "shares"


def make_datum(types: Any, sample: Sample, *, can_mask: bool, **numbers: Floats) -> Any:
    """Returns the sample shifted by one, as the protocol has it, with one number for each trained token by name.

    Other tokens have 0. With `can_mask` they are left out, so that the server computes what the torch learner does;
    the sample is sent whole then, because its length decides on its pack. Without, it ends with its last target.
    """
    end = len(sample.token_ids) - 1 if can_mask else int(sample.targets[-1])
    inputs: dict[str, Any] = {"target_tokens": sample.token_ids[1 : end + 1].astype(np.int64)}
    if can_mask:
        numbers = {**numbers, MASK: np.ones(len(sample.targets))}
    for name, values in numbers.items():
        row = np.zeros(end, dtype=np.float32)
        row[sample.targets - 1] = np.nan_to_num(values)
        inputs[name] = row
    return types.Datum(model_input=types.ModelInput.from_ints(sample.token_ids[:end].tolist()), loss_fn_inputs=inputs)


def logprobs_of(answer: Any, samples: Sequence[Sample]) -> list[Floats]:
    """Returns [N] of each sample's targets. Raises RemoteError if the server gave something else."""
    outputs = answer.loss_fn_outputs
    found: list[Floats] = []
    if len(outputs) == len(samples):
        for output, sample in zip(outputs, samples, strict=True):
            row = np.asarray(output["logprobs"].to_numpy(), dtype=np.float64).ravel() if "logprobs" in output else None
            if row is None or len(row) not in (sample.targets[-1], len(sample.token_ids) - 1):
                break
            found.append(row[sample.targets - 1])
    if len(found) != len(samples) or not all(np.isfinite(row).all() for row in found):
        raise RemoteError("the server's answer lacks finite logprobs of each token that was sent")
    return found


def norm_of(answer: Any) -> float:
    """Returns the norm of the gradient before the clip; NaN if the server does not report it."""
    metrics = getattr(answer, "metrics", None) or {}
    for name, value in metrics.items():
        if name.partition(":")[0].rpartition("/")[2] == "grad_norm":  # SkyRL puts its own address before
            return float(value)
    return math.nan
