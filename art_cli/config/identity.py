"""Which training a configuration describes: its hash, and how two of them differ.

Both leave out the same keys: what may change between two starts of one run without changing what is learned. So two
configurations have the same hash exactly when there is no difference to name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from art_cli.config.places import join
from art_cli.config.schema import RunConfig

NOT_TRAINING = frozenset(
    {
        # where it runs and who watches
        *("name", "runs", "gateway", "tracker"),
        # how long it runs, and what is kept of it
        *("train.steps", "train.keep_checkpoints"),
        # what it may cost
        *("judge.budget_usd", "judge.budget_tokens", "judge.price"),
        # speed and memory; the gradient is the same for every packing and micro-batch size
        *("rollout.concurrency", "judge.concurrency", "judge.retries", "judge.timeout_s", "judge.cache"),
        *(
            "learner.device",
            "learner.micro_batch_tokens",
            "learner.gradient_checkpointing",
            "learner.packing",
            "learner.processes",
        ),
        "learner.offload_optimizer",
        # which engine samples and how it runs; that it samples from the learner's weights is proved after each step
        "engine",
        # which learner takes the step: all of them compute the same one
        "learner.name",
    }
)


def config_hash(config: RunConfig) -> str:
    """16 hexadecimal digits, the same for every configuration that trains the same."""
    text = json.dumps(_training(config.model_dump(mode="json")), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each key in which two dumped configurations train differently; empty: the same training.

    Example: ["train.learning_rate: 1e-05 -> 0.0001", "loss: grpo -> dapo"].
    """
    return list(_differences("", _training(old), _training(new)))


def _training(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in section.items():
        key = join(prefix, name)
        if key in NOT_TRAINING:
            continue
        if key == "model.chat_template" and value is not None:
            value = PurePath(value).name  # absolute, and a project may be moved between two starts
        kept[name] = _training(value, key) if isinstance(value, Mapping) else value
    return kept


def _differences(key: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        yield f"{key}: {json.dumps(old)} -> {json.dumps(new)}"
    elif old.get("name") != new.get("name"):
        yield f"{key}: {old.get('name')} -> {new.get('name')}"
    else:
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(join(key, name), old.get(name), new.get(name))
