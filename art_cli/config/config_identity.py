"""The identity of a training run: a configuration hash, and the differences between two configurations.

Both ignore keys that do not change the learned weights, so equal hashes mean no differences. Some keys, such as the
learning rate, may change during a run, because past steps stay valid. Other differences require a new run.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any, NamedTuple

from art_cli.config.key_locations import join
from art_cli.config.schema import RunConfig
from art_cli.config.sections.base_config import OLD_NAMES
from art_cli.runtime.errors import printable

NOT_TRAINING = frozenset(
    {
        # paths and observers
        *("name", "runs", "store", "gateway", "tracker", "trackers", "stop", "shadow", "improve"),
        # length of the run, and kept files
        *("train.steps", "train.keep_checkpoints", "train.keep_best", "train.record_learned"),
        # the judge's budget
        *("judge.budget_usd", "judge.budget_tokens", "judge.price"),
        # speed and memory; packing and micro-batch size do not change the gradient
        *("rollout.concurrency", "rollout.cluster"),
        *("judge.concurrency", "judge.retries", "judge.timeout_s", "judge.cache"),
        *("learner.device", "learner.micro_batch_tokens", "learner.gradient_checkpointing", "learner.packing"),
        *("learner.processes", "learner.nodes", "learner.rendezvous", "learner.shard", "learner.join_timeout_s"),
        "learner.offload_optimizer",
        # the engine, which after every step provably samples from the learner's weights
        "engine",
        # connection to a teacher's server
        *("loss.teacher.base_url", "loss.teacher.api_key_env", "loss.teacher.timeout_s", "loss.teacher.retries"),
        *("loss.teacher.concurrency", "loss.teacher.protocol"),
        # connection to the prompt-writing model
        *("learner.base_url", "learner.api_key_env", "learner.price"),
        # all learners compute the same step
        "learner.name",
    }
)

MAY_CHANGE = frozenset(  # a run may resume with new values, and records the step of the change
    {
        # size of later updates
        *("train.learning_rate", "train.warmup_steps", "train.decay", "train.decay_to", "train.betas"),
        *("train.weight_decay", "train.max_grad_norm", "train.clip_to_history", "train.max_kl"),
        "train.steps",  # with a decaying learning rate
        "train.max_logprob_gap",
        # evaluation schedule and attempts
        *("eval.every", "eval.attempts"),
        # rollout limits and retries; finished rollouts stay valid
        *("rollout.timeout_s", "rollout.retries", "rollout.processes", "rollout.python"),
        # tries for a usable answer from the judge
        "judge.attempts",
        # a judge of one's own, trained again on what a cascade's second judge has scored
        "judge.first.model",
    }
)


# Keys that may also change before the first update; the attempts from `art plan` stay valid.
MAY_CHANGE_FIRST = frozenset(
    {"model.max_length", "rollout.groups_per_step", "rollout.max_turns", "rollout.sampling.max_tokens"}
)


class Change(NamedTuple):
    """A changed key. Example: Change("train.learning_rate", 1e-05, 0.0001)."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if isinstance(self.old, Mapping) and isinstance(self.new, Mapping):  # the section is another variant
            return f"{printable(self.key)}: {printable(self.old.get('name'))} -> {self.new.get('name')}"
        return f"{printable(self.key)}: {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def is_allowed(self) -> bool:
        """Returns True if a run can resume with the new value."""
        return general(self.key) in MAY_CHANGE


def general(key: str) -> str:
    """Maps a source's key to the run's key, and the budgets and prices of inner judges to the judge's key.

    Example: rollout.sources.a.timeout_s -> rollout.timeout_s
    """
    key = re.sub(r"^rollout\.sources\.[^.]+\.(judge\b|)", lambda found: found[1] or "rollout.", key)
    return re.sub(r"^judge\.(judges|panel)\.[^.]+\.(?=budget_usd$|budget_tokens$|price$)", "judge.", key)


def config_hash(config: RunConfig) -> str:
    """Returns 16 hexadecimal digits that identify the training."""
    training = _training(config.model_dump(mode="json"))
    text = json.dumps(_renamed(training, {"base_url": "api_base"}), sort_keys=True)  # name in the hashes of older runs
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def speed_hash(config: RunConfig) -> str:
    """Returns 16 hexadecimal digits that identify the settings for speed and memory."""
    dumped = config.model_dump(mode="json")
    rollout, at_once = dumped["rollout"], dumped["judge"].get("concurrency")
    decides = [dumped["engine"], dumped["learner"], rollout["concurrency"], rollout["cluster"], at_once]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the differences between two dumped configurations, sorted by key."""
    return list(_differences("", _training(_renamed(old, OLD_NAMES)), _training(_renamed(new, OLD_NAMES))))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(name, name): _renamed(each, names) for name, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value


def _training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys except NOT_TRAINING, but with `train.steps` if the learning rate decays."""
    train = config.get("train")
    decays = isinstance(train, Mapping) and train.get("decay", "none") != "none"
    return _without(NOT_TRAINING - {"train.steps"} if decays else NOT_TRAINING, config)


def _without(left_out: Set[str], section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in section.items():
        key = join(prefix, name)
        if general(key) in left_out:
            continue
        if key == "model.chat_template" and isinstance(value, str):
            value = PurePath(value).name  # without the absolute directory, because a project may move
        kept[name] = _without_in(left_out, value, key)
    return kept


def _without_in(left_out: Set[str], value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return _without(left_out, value, key)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_in(left_out, each, join(key, str(number))) for number, each in enumerate(value)]
    return value


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
    """Returns the value as JSON, shortened to 80 characters."""
    try:
        return printable(json.dumps(value), limit=80)
    except ValueError:
        return "a number of thousands of digits"
