"""The identity of a training: a configuration's hash, and the differences of two configurations.

Both leave out the keys that do not change the learned weights. So two configurations have the same hash exactly if they
do not differ. Some keys may change at a step of a run (the learning rate, the schedule of evaluations), because past
steps keep their meaning. Any other difference makes another run.
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
        # the run's place and its observers
        *("name", "runs", "store", "gateway", "tracker", "trackers", "stop", "shadow"),
        # the length of the run, and what is kept of it
        *("train.steps", "train.keep_checkpoints", "train.keep_best", "train.record_learned"),
        # the judge's budget
        *("judge.budget_usd", "judge.budget_tokens", "judge.price"),
        # speed and memory: the gradient is the same for every packing and micro-batch size
        *(
            "rollout.concurrency",
            "rollout.cluster",
            "judge.concurrency",
            "judge.retries",
            "judge.timeout_s",
            "judge.cache",
        ),
        *(
            "learner.device",
            "learner.micro_batch_tokens",
            "learner.gradient_checkpointing",
            "learner.packing",
            "learner.processes",
            *("learner.nodes", "learner.rendezvous", "learner.shard", "learner.join_timeout_s"),
        ),
        "learner.offload_optimizer",
        # the engine: after each step the run proves that it samples from the learner's weights
        "engine",
        # how a teacher's server is reached
        *("loss.teacher.base_url", "loss.teacher.api_key_env", "loss.teacher.timeout_s", "loss.teacher.retries"),
        *("loss.teacher.concurrency", "loss.teacher.protocol"),
        # how the model that writes prompts is reached
        *("learner.base_url", "learner.api_key_env", "learner.price"),
        # the learner: all learners compute the same step
        "learner.name",
    }
)

MAY_CHANGE = frozenset(  # a run goes on with other values of these, and records from which step on
    {
        # the size of the next steps
        *("train.learning_rate", "train.warmup_steps", "train.decay", "train.decay_to", "train.betas"),
        *("train.weight_decay", "train.max_grad_norm", "train.clip_to_history", "train.max_kl"),
        "train.steps",  # where the learning rate decays to them
        "train.max_logprob_gap",
        # the schedule of evaluations, and the number of attempts in each
        *("eval.every", "eval.attempts"),
        # the limits and retries of rollouts; finished rollouts stay as they are
        *("rollout.timeout_s", "rollout.retries", "rollout.processes", "rollout.python"),
        # the attempts at a usable answer of the judge
        "judge.attempts",
    }
)


# Before the first update; attempts that `art plan` has played stay as they are.
MAY_CHANGE_FIRST = frozenset(
    {"model.max_length", "rollout.groups_per_step", "rollout.max_turns", "rollout.sampling.max_tokens"}
)


class Change(NamedTuple):
    """One key in which two configurations differ. Example: Change("train.learning_rate", 1e-05, 0.0001)."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if isinstance(self.old, Mapping) and isinstance(self.new, Mapping):  # the section is another variant
            return f"{printable(self.key)}: {printable(self.old.get('name'))} -> {self.new.get('name')}"
        return f"{printable(self.key)}: {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def is_allowed(self) -> bool:
        """Whether a run may be resumed with the new value."""
        return general(self.key) in MAY_CHANGE


def general(key: str) -> str:
    """Returns the key that the value of a source, or a budget or price of a blended judge or of a panel's, stands for.

    Example: rollout.sources.a.timeout_s: rollout.timeout_s
    """
    key = re.sub(r"^rollout\.sources\.[^.]+\.(judge\b|)", lambda found: found[1] or "rollout.", key)
    return re.sub(r"^judge\.(judges|panel)\.[^.]+\.(?=budget_usd$|budget_tokens$|price$)", "judge.", key)


def config_hash(config: RunConfig) -> str:
    """Returns 16 hexadecimal digits, the same for all configurations of the same training."""
    training = _training(config.model_dump(mode="json"))
    text = json.dumps(_renamed(training, {"base_url": "api_base"}), sort_keys=True)  # older runs' hashes have that name
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def speed_hash(config: RunConfig) -> str:
    """Returns 16 hexadecimal digits, the same for configurations that take the same time and memory in training."""
    dumped = config.model_dump(mode="json")
    rollout, judge = dumped["rollout"], dumped["judge"]
    decides = [
        dumped["engine"],
        dumped["learner"],
        rollout["concurrency"],
        rollout["cluster"],
        judge.get("concurrency"),
    ]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the differences of two dumped configurations, in alphabetical order of the keys."""
    return list(_differences("", _training(_renamed(old, OLD_NAMES)), _training(_renamed(new, OLD_NAMES))))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(name, name): _renamed(each, names) for name, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value


def _training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys but NOT_TRAINING. The run's length is among them if the learning rate decays over it."""
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
            value = PurePath(value).name  # the path is absolute, and a project may be moved between two starts
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
    """Returns the value as JSON, shortened if it is long, because a file may hold anything."""
    try:
        return printable(json.dumps(value), limit=80)
    except ValueError:
        return "a number of thousands of digits"
