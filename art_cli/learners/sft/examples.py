"""Examples: what a supervised warm-up learns from, read from files, divided, and made into samples. No torch.

An example is a chat transcript {"messages": [...], "tools": [...]} (demos.py), or an attempt of the policy's own with
its tokens {"id": ..., "scenario": ..., "turns": [...]} (best_of.py). Both are plain JSON.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from art_cli.config.schema import SftConfig
from art_cli.learners.samples import Sample, trajectory_samples
from art_cli.learners.sft.best_of import ScoredAttempt, best_attempts
from art_cli.learners.sft.demos import demo_samples, load_demos
from art_cli.learners.token_weights import Credit, token_weights
from art_cli.rollouts.splits import is_held_out
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import DataError, LearnerError

Json = dict[str, Any]


class Examples(NamedTuple):
    """The examples to train on, and those that the loss is measured on and that are never trained on."""

    trained: list[Json]
    evaluated: list[Json]


def load_examples(config: SftConfig, directory: Path, sources: Sequence[str] = ()) -> Examples:
    """Returns the examples of an `sft` section, in order. `sources` take the place of its `demos`.

    Raises DataError if some cannot be read, or none is left to train or to evaluate on; UsageError if a function cannot
    be loaded.
    """
    trained = _read(sources or [config.demos], config, directory)
    if config.eval_demos is not None:
        return Examples(trained, _read([config.eval_demos], config, directory))
    share = config.held_out
    if share is None:
        return Examples(trained, [])
    parts = Examples([], [])
    for example in trained:
        parts[is_held_out(_content(example), share)].append(example)
    for part, what in zip(parts, ("train", "evaluate"), strict=True):
        if not part:
            raise DataError(
                f"sft.held_out = {share:g} of {len(trained)} examples leaves none to {what} on; choose another share, "
                "or name a file in sft.eval_demos",
                config.demos,
            )
    return parts


def _read(sources: Sequence[str], config: SftConfig, directory: Path) -> list[Json]:
    if config.best_of is None:
        return [demo for source in sources for demo in load_demos(source, directory)]
    num, least = config.best_of, config.min_reward
    found = [each for source in sources for each in best_attempts(directory / source, num, min_reward=least)]
    if not found:
        wanted = "is better than the worst of its group" if least is None else f"has a reward of {least:g} or more"
        raise DataError(f"no attempt {wanted}; set min_reward to the lowest that is good enough", ", ".join(sources))
    return found


def _content(example: Json) -> str:
    """Returns the key by which an example is split: its scenario, or the hash of a whole transcript.

    So all attempts at a scenario are on one side, and eval.held_out with the same share holds out the same scenarios.
    """
    if "turns" in example:
        return str(example["scenario"])
    return hashlib.sha256(json.dumps(example, sort_keys=True, default=repr).encode()).hexdigest()


def example_samples(example: Json, tokenizer: Any, *, name: str, max_length: int, vocabulary: int) -> list[Sample]:
    """Returns the samples of an example, with weight 1 in the cross entropy of every token that the policy is to write.

    `name` is that of a transcript in messages; an attempt has its own. An attempt's tokens are trained at the
    temperature at which they were sampled, as in a policy step. `vocabulary` is the model's number of tokens. Raises
    LearnerError: an example that cannot be trained on.
    """
    if "turns" not in example:
        return demo_samples(example, tokenizer, name=name, max_length=max_length)
    attempt = msgspec.convert(example, ScoredAttempt)
    record = Trajectory(id=attempt.id, group_id="", group_size=1, index=0, turns=attempt.turns)
    samples = trajectory_samples(record, token_weights(record, Credit(cross_entropy=1.0)))
    for sample in samples:
        where = f"trajectory {attempt.id}, turn {sample.turn}"
        if len(sample.token_ids) > max_length:
            raise LearnerError(f"{where}: {len(sample.token_ids)} tokens, over the model's {max_length}; leave it out")
        if not 0 <= int(np.min(sample.token_ids)) <= int(np.max(sample.token_ids)) < vocabulary:
            raise LearnerError(f"{where}: a token that the model does not have; it was sampled from another model")
    if not samples:
        raise LearnerError(f"trajectory {attempt.id}: no sampled token to learn from")
    return samples
