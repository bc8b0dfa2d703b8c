"""Which training a configuration describes: its hash, and how two of them differ.

Both leave out the same keys: what may change between two starts of one run without changing what is learned. So two
configurations have the same hash exactly when there is no difference to name. Of the differences, some may hold from a
step on (how fast the next steps learn, how often the policy is evaluated), as they leave the meaning of past steps
alone; the others make another run.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from art_cli.config.places import join
from art_cli.config.schema import RunConfig
from art_cli.errors import printable

NOT_TRAINING = frozenset(
    {
        # where it runs and who watches
        *("name", "runs", "gateway", "tracker", "trackers"),
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

MAY_CHANGE = frozenset(  # from a step of a run on, which the run records
    {
        # how far the next steps go
        *("train.learning_rate", "train.warmup_steps", "train.weight_decay", "train.max_grad_norm"),
        "train.max_logprob_gap",
        # when the policy is evaluated, and how often each scenario is played then
        *("eval.every", "eval.attempts"),
        # what stops or repeats a rollout that fails; those that ended stay as they are
        *("rollout.timeout_s", "rollout.retries", "rollout.processes", "rollout.python"),
        # how often a judge whose answer cannot be used is asked again
        "judge.attempts",
    }
)


class Change(NamedTuple):
    """One key in which two configurations differ. Example: Change("train.learning_rate", 1e-05, 0.0001)."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if isinstance(self.old, Mapping) and isinstance(self.new, Mapping):  # another variant of a section
            return f"{printable(self.key)}: {printable(self.old.get('name'))} -> {self.new.get('name')}"
        return f"{printable(self.key)}: {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def is_allowed(self) -> bool:
        """Whether a run may go on with the new value."""
        return self.key in MAY_CHANGE


def config_hash(config: RunConfig) -> str:
    """16 hexadecimal digits, the same for every configuration that trains the same."""
    text = json.dumps(_training(config.model_dump(mode="json")), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys in which two dumped configurations train differently, in alphabetical order."""
    return list(_differences("", _training(old), _training(new)))


def _training(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in section.items():
        key = join(prefix, name)
        if key in NOT_TRAINING:
            continue
        if key == "model.chat_template" and isinstance(value, str):
            value = PurePath(value).name  # absolute, and a project may be moved between two starts
        kept[name] = _training(value, key) if isinstance(value, Mapping) else value
    return kept


def _differences(key: str, old: Any, new: Any) -> Iterator[Change]:
    if old == new:
        return
    is_section = isinstance(old, Mapping) and isinstance(new, Mapping)
    if not is_section or old.get("name") != new.get("name"):
        yield Change(key, old, new)
    else:
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(join(key, name), old.get(name), new.get(name))


def _shown(value: Any) -> str:
    """The value as JSON, cut where it is long: what is in a file may be anything."""
    try:
        return printable(json.dumps(value), limit=80)
    except ValueError:
        return "a number of thousands of digits"
