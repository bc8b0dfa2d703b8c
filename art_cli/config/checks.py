"""Checks across sections: contradicting settings, and configurations that cannot be trained."""

from collections import Counter
from collections.abc import Callable, Iterator

from art_cli.config import schema
from art_cli.config.metric_names import SHADOW, judge_costs, why_unknown
from art_cli.config.schema import RunConfig
from art_cli.config.sections.engine_config import ONLY_BFLOAT16
from art_cli.config.sections.rollout_config import cluster_conflicts
from art_cli.config.sections.train_config import ONE_OF_BOTH

PROMPT_TRAIN = frozenset({"steps", "keep_checkpoints", "keep_best", "seed"})  # `train` keys for a prompt search


def conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, message) for contradicting settings."""
    if config.rollout.sources:
        yield from _source_conflicts(config)
    elif config.eval is not None and config.eval.scenarios is None and config.eval.held_out is None:
        yield "eval", ONE_OF_BOTH
    if isinstance(config.learner, schema.PromptLearnerConfig) and reflecting_model(config, config.learner) is None:
        judges = " and ".join(dict.fromkeys(repr(part.judge.name) for part in config.by_source.values()))
        yield "learner.model", f"judge {judges} cannot reflect, because it is not a language model; name one"
    for number, rule in enumerate(config.stop):
        yield from _stop_conflicts(config, f"stop.{number}", rule)
    yield from _improve_conflicts(config)
    yield from _of_each_source(config, _conflicts)
    yield from _of_each_source(config, _unused, has_use=True)


def _improve_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.improve is None:
        return
    metric, declared = config.improve.canary.metric, config.gateway.feedback
    if metric not in declared:
        there = f"it has {', '.join(declared)}" if declared else f"add {metric}: {{type: boolean}}"
        yield "improve.canary.metric", f"{metric!r} is not declared in gateway.feedback; {there}"
    gates, has_safety = config.improve.gates, config.improve.safety is not None
    if has_safety and "safety" not in gates:
        yield "improve.gates", "has none for improve.safety; add safety: 'reward>=baseline'"
    if not ("traffic" in gates or has_safety or (config.eval is not None and "tasks" in gates)):
        yield "improve.gates", "would let every candidate answer untested; add traffic: 'reward>=baseline-0.02'"
    if config.rollout.scenarios is None:
        yield (
            "improve",
            "learns from scenarios of traffic, so it needs rollout.scenarios, not an environment or sources",
        )
    if not config.learner.trains_weights:
        yield "improve", f"learner {config.learner.name!r} trains no weights"
    elif config.learner.weights == "server":
        yield "improve", f"learner {config.learner.name!r} has no weights here that art gateway --follow could serve"


def _of_each_source(
    config: RunConfig, check: Callable[[RunConfig], Iterator[tuple[str, str]]], *, has_use: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the messages of `check` on every source. `has_use`: shared settings only if all sources report them."""
    parts = config.by_source
    found = Counter(
        (config.key_in(name, key), text) for name, part in parts.items() for key, text in dict.fromkeys(check(part))
    )
    for (key, text), num in found.items():
        if num == len(parts) or not has_use or key.startswith("rollout.sources."):
            yield key, text


def _source_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    sources = config.rollout.sources
    if config.rollout.cluster is not None:
        yield "rollout.cluster", "a cluster plays one agent, and rollout.sources has several; leave one of them out"
    if config.eval is not None and config.eval.scenarios is not None:
        yield "eval.scenarios", "with rollout.sources each source has its own: rollout.sources.NAME.eval_scenarios"
    if "judge" in config.model_fields_set and all(source.judge is not None for source in sources.values()):
        yield "judge", "every source of rollout.sources has its own judge; remove this one"
    for name, source in sources.items():
        key, is_set = f"rollout.sources.{name}.eval_scenarios", source.eval_scenarios is not None
        if is_set and config.eval is None:
            yield key, "used with an eval section only; add one, or leave it out"
        elif not is_set and config.eval is not None and config.eval.held_out is None:
            yield key, "missing: name a file or function, or set eval.held_out, a share of each source's scenarios"


def _conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    section = "loss" if config.algorithm is None else "algorithm"
    yield from _algorithm_conflicts(config, section)
    yield from _adapter_conflicts(config)
    for name, part in ((section, config.learns_by), ("train", config.train), ("sft", config.sft)):
        for knob, message in part.conflicts() if part is not None else ():
            yield f"{name}.{knob}", message
    yield from _judge_conflicts(config)
    for shadow_name, shadow in config.shadow.items():
        if shadow.judge.noise is not None:
            message = "corrects advantages, and a shadow judge is not trained on; leave it out"
            yield f"shadow.{shadow_name}.judge.noise", message
    yield from _cluster_conflicts(config)
    if config.train.max_staleness > 0:
        yield from _stale_conflicts(config, section)
    if isinstance(config.learner, schema.BaseLearnerConfig):
        yield from _node_conflicts(config.learner)
        if config.learner.num_ranks > 1:
            yield from _process_conflicts(config, config.learner)
    if isinstance(config.learner, schema.TinkerLearnerConfig):
        yield from _remote_conflicts(config, section)
    if isinstance(config.learner, schema.PromptLearnerConfig):
        for key in keys_of_weights(config):
            yield key, "learner 'prompt' changes no weights and does not use it; remove it"
    if isinstance(config.learns_by, schema.PpoConfig):
        yield from _critic_conflicts(config, config.learns_by)
    if isinstance(config.learns_by, schema.DapoConfig) and config.learns_by.overlong == "penalty":
        for name in (name for name, source in config.rollout.sources.items() if source.max_tokens is not None):
            cure = "leave it out, or set overlong to mask"
            yield f"rollout.sources.{name}.max_tokens", f"{section}.overlong=penalty knows one limit for all: {cure}"
    if isinstance(config.engine, schema.VllmEngineConfig) and config.model.quantize is not None:
        if config.model.dtype == "float32":
            yield "model.dtype", f"{ONLY_BFLOAT16}; set it to auto, or engine=embedded"
        if config.engine.sleep == 2:
            yield "engine.sleep", "in 4 bits vLLM cannot load the weights again when it wakes; set it to 1 or auto"
    if config.train.updates_per_step > (groups := config.rollout.groups_per_step):
        yield "train.updates_per_step", f"at most rollout.groups_per_step ({groups}): a step is split by groups"


def _algorithm_conflicts(config: RunConfig, section: str) -> Iterator[tuple[str, str]]:
    if config.algorithm is not None and "loss" in config.model_fields_set:
        yield "algorithm", "takes the place of 'loss', which is set too; leave one of them out"
    if config.learns_by.kl > 0 and config.model.lora is None:
        yield f"{section}.kl", "needs model.lora: the reference policy is the model with its adapter off; set it to 0"
    if config.learns_by.echo > 0 and config.rollout.max_turns == 1:
        yield f"{section}.echo", "what the environment answers is in a later prompt, and rollout.max_turns is 1"


def _adapter_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields settings that require a LoRA adapter, if all weights are trained."""
    if config.model.lora is not None:
        return
    if isinstance(config.learner, schema.UnslothLearnerConfig):
        yield "learner", "'unsloth' trains LoRA adapters only; set model.lora, or learner=torch"
    if config.model.quantize is not None:
        message = "a base in few bits is frozen: set model.lora, or model.quantize=null to train all weights"
        yield "model.quantize", message
    if config.engine.swaps_adapters:
        cannot = f"{config.engine.name!r} swaps LoRA adapters and cannot follow whole weights"
        yield "engine", f"{cannot}; set model.lora, or engine=embedded"


def _unused(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields unused settings in `rollout`."""
    rollout = config.rollout
    if rollout.command is not None and rollout.cluster is None and "processes" in rollout.model_fields_set:
        yield "rollout.processes", "each attempt of rollout.command is already a process; remove it"
    if rollout.env and rollout.command is None:
        yield "rollout.env", "only the program of rollout.command takes it; a function has art's own environment"
    if rollout.python is not None and rollout.command is not None:
        yield "rollout.python", "rollout.command begins with its own program; leave it out"
    if rollout.environment is not None and rollout.scenarios is not None:
        for knob in {"size", "seed"} & rollout.environment.model_fields_set:
            yield f"rollout.environment.{knob}", "the scenarios are the ones in rollout.scenarios; remove one key"
    if rollout.python is not None and rollout.processes == 0 and rollout.cluster is None:
        yield "rollout.python", "with rollout.processes=0 the function runs in the Python of art; leave one of them out"
    if rollout.choose == "adaptive" and "shuffle" in rollout.model_fields_set:
        yield "rollout.shuffle", "used with rollout.choose 'epochs' only, which is 'adaptive'; leave one of them out"


def _cluster_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    if rollout.cluster is None:
        return
    processes = rollout.processes if "processes" in rollout.model_fields_set else None
    for knob, message in cluster_conflicts(processes=processes, python=rollout.python, entry=rollout.entry):
        yield f"rollout.{knob}", message


def _stop_conflicts(config: RunConfig, key: str, rule: schema.StopRule) -> Iterator[tuple[str, str]]:
    for knob, message in rule.conflicts():
        yield f"{key}.{knob}", message
    if rule.parts_from is not None and (reason := why_unknown(f"{SHADOW}{rule.parts_from}", config)):
        yield f"{key}.parts_from", f"{rule.parts_from!r}: {reason}"
    if rule.metric is not None and (reason := why_unknown(rule.metric, config)):
        yield f"{key}.metric", f"{rule.metric}: {reason}"
    if rule.usd is not None and not rule.usd_per_hour and not any(map(judge_costs, config.by_source.values())):
        yield f"{key}.usd", f"judge {config.judge.name!r} costs nothing; set usd_per_hour, what the machine costs"


def _judge_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    name = config.judge.name
    if name == "none" and config.learns_by.needs_rewards:
        yield "judge", "'none' gives no rewards, which this loss learns from; leave it out, or set loss=distill"
    if (noise := None if isinstance(config.judge, schema.NoJudgeConfig) else config.judge.noise) is not None:
        if not config.learns_by.compares_rewards_alone:
            why = "weighs comparisons within a group, and this loss also learns from something else: set it to null"
            yield "judge.noise", why
        if noise.is_from_votes and not has_votes(config.judge):
            cure = "ask for several votes (judge=ruler, judge.votes=4), or set false_positive and false_negative"
            yield "judge.noise", f"judge {name!r} gives each attempt one score, which shows no error: {cure}"
        if not noise.is_from_votes and name not in ("rollout", "metric", "function"):
            yield "judge.noise", f"flip rates are of verdicts 0 and 1, and judge {name!r} gives scores; set it to votes"
    if isinstance(config.loss, schema.GrpoConfig) and config.loss.baseline == "shrunk" and ranks(config.judge):
        yield (
            "loss.baseline",
            f"'shrunk' compares scenarios, and judge {name!r} only the attempts at one; set it to group",
        )
    if config.loss.needs_explanations and name in ("rollout", "metric", "none", "reward_model"):
        cure = f"judge {name!r} gives no reasons; choose judge=ruler"
        yield "loss", f"'sdpo' teaches by the judge's explanations, and {cure}"
    learns_by = config.learns_by
    has_teacher = isinstance(learns_by, schema.TaughtLossConfig)
    if config.rollout.refill > 0 and not learns_by.compares_rewards_alone and not has_teacher:
        why = f"with {config.loss.name!r} these teach as well"
        yield "rollout.refill", f"replaces groups of equal rewards, and {why}; set it to 0"
    if not config.learns_by.needs_rewards:
        rollout = config.rollout
        chosen = {"refill": rollout.refill > 0, "choose": rollout.choose == "adaptive"}
        for knob in (knob for knob, is_set in chosen.items() if is_set):
            yield f"rollout.{knob}", "goes by rewards, and this loss learns from none; leave it out"
    teacher = config.loss.teacher if isinstance(config.loss, schema.DistillConfig) else None
    if teacher is not None and teacher.base_url is not None and config.rollout.sampling.temperature != 1:
        message = "a teacher behind a server gives logprobs at temperature 1 only; set it to 1"
        yield "rollout.sampling.temperature", message


def has_votes(judge: schema.JudgeConfig) -> bool:
    """Returns True if the judge may give several votes per attempt. A user's judge may; every RULER in a blend must."""
    if isinstance(judge, schema.BlendJudgeConfig):
        parts = [judge.judges.get(name, schema.RolloutJudgeConfig()) for name in judge.blend]
        rulers = [part for part in parts if isinstance(part, schema.RulerJudgeConfig)]
        return any(map(has_votes, parts)) and all(map(has_votes, rulers))
    if isinstance(judge, schema.RulerJudgeConfig):
        return judge.votes > 1
    return isinstance(judge, schema.FunctionJudgeConfig)


def ranks(judge: schema.JudgeConfig) -> bool:
    """Returns True if the judge's rewards compare within a group only; False for user code."""
    if isinstance(judge, schema.BlendJudgeConfig):
        return any(name == "ruler" if name not in judge.judges else ranks(judge.judges[name]) for name in judge.blend)
    if isinstance(judge, schema.FeedbackJudgeConfig):
        return judge.otherwise is not None and ranks(judge.otherwise)
    if isinstance(judge, schema.CascadeJudgeConfig):
        return not judge.has_values or ranks(judge.then)
    return isinstance(judge, schema.RulerJudgeConfig)


def _stale_conflicts(config: RunConfig, section: str) -> Iterator[tuple[str, str]]:
    if isinstance(config.learner, schema.TinkerLearnerConfig):
        yield "train.max_staleness", "tokens of an older policy need weights, which a server does not take; set it to 0"
    elif config.learns_by.off_policy is None:
        cure = f"set {section}.off_policy.name (truncate is usual)"
        yield "train.max_staleness", f"tokens of an older policy need weights: {cure}"
    if isinstance(config.engine, schema.VllmEngineConfig) and config.engine.sleep in (1, 2):
        yield "engine.sleep", "with train.max_staleness the engine samples while the learner works; set it to 0"


def _node_conflicts(learner: schema.BaseLearnerConfig) -> Iterator[tuple[str, str]]:
    if learner.nodes > 1 and learner.rendezvous is None:
        cure = "HOST:PORT, an address of the machine that runs `art train` and a free port there"
        yield "learner.rendezvous", f"learner.nodes is {learner.nodes}, and they need a place to meet; set it to {cure}"
    for knob in ("rendezvous", "shard", "join_timeout_s") if learner.nodes == 1 else ():
        if knob in learner.model_fields_set and getattr(learner, knob) is not None:
            yield f"learner.{knob}", "used with learner.nodes above 1 only; set that, or leave it out"


def _process_conflicts(config: RunConfig, learner: schema.BaseLearnerConfig) -> Iterator[tuple[str, str]]:
    if isinstance(learner, schema.UnslothLearnerConfig):
        knob = "nodes" if learner.nodes > 1 else "processes"
        yield f"learner.{knob}", "'unsloth' trains in one process on one GPU; set learner=torch, or leave it out"
    if config.model.quantize is not None:
        key = "learner.processes" if learner.processes > 1 else "learner.nodes"
        yield key, "a base in few bits cannot be divided between processes; set model.quantize=null, or 1"
    if learner.offload_optimizer:
        yield "learner.offload_optimizer", "with several processes the optimizer is divided between the GPUs already"
    if learner.device not in ("auto", "cpu") and learner.device.partition(":")[0] != "cuda":
        yield "learner.device", "with several processes each takes its own GPU: auto, cuda, cuda:N or cpu"


def _remote_conflicts(config: RunConfig, section: str) -> Iterator[tuple[str, str]]:
    """Yields settings that the Tinker protocol cannot express, with alternatives."""
    loss, train = config.learns_by, config.train
    if not isinstance(config.engine, schema.TinkerEngineConfig):
        cure = "set engine=tinker engine.base_url=..."
        yield "learner", f"'tinker' trains on the server that engine=tinker samples from; {cure}"
    if config.model.quantize is not None:
        yield "model.quantize", "learner 'tinker' leaves the base model to the server; leave it out"
    if config.algorithm is not None:
        yield "algorithm", "its objective runs where the weights are, and a server runs its own; choose a loss by name"
    if isinstance(loss, schema.PpoConfig | schema.TaughtLossConfig):
        why = "needs more of the model than a server of the Tinker protocol gives"
        yield "loss", f"{loss.name!r} {why}; loss=grpo would do"
    if config.rollout.sampling.temperature not in (0, 1):
        yield "rollout.sampling.temperature", "a server of the Tinker protocol computes logprobs at 1 only; set it to 1"
    unsayable = {
        "kl": (loss.kl > 0, "needs the reference policy's logprobs in the loss; 0, with train.learning_rate lower"),
        "off_policy": (loss.off_policy is not None, "weighs tokens by logprobs of two policies; null, or loss=cispo"),
    }
    for knob, (is_set, why) in unsayable.items():
        if is_set:
            yield f"{section}.{knob}", f"cannot be expressed in the Tinker protocol: it {why}"
    if train.kl_bound is not None:
        yield "train.max_kl", "draws weights back, and these are the server's; null, with train.epochs_per_step lower"


def reflecting_model(config: RunConfig, learner: schema.PromptLearnerConfig) -> schema.JudgeModelConfig | None:
    """Returns the reflecting model: `learner.model`, else the model in the first RULER judge without a panel."""
    if learner.member is not None:
        return learner.member
    for judge in (part.judge for part in (config, *config.by_source.values())):
        if isinstance(judge, schema.RulerJudgeConfig) and not judge.panel and not judge.is_rule:
            keys = {name: getattr(judge, name) for name in schema.JudgeModelConfig.model_fields}
            return schema.JudgeModelConfig.model_validate(keys | {"response_format": "text"})
    return None


def keys_of_weights(config: RunConfig) -> list[str]:
    """Returns the set keys that a prompt search does not use."""
    is_set = {
        "loss": "loss" in config.model_fields_set,
        "algorithm": config.algorithm is not None,
        "sft": config.sft is not None,
        "model.lora": "lora" in config.model.model_fields_set and config.model.lora is not None,
        "model.quantize": config.model.quantize is not None,
        "rollout.refill": config.rollout.refill > 0,
        "judge.noise": not isinstance(config.judge, schema.NoJudgeConfig) and config.judge.noise is not None,
    }
    of_train = [f"train.{name}" for name in sorted(config.train.model_fields_set - PROMPT_TRAIN)]
    return [key for key, value in is_set.items() if value] + of_train


def _critic_conflicts(config: RunConfig, loss: schema.PpoConfig) -> Iterator[tuple[str, str]]:
    if config.rollout.group_size == 1 and config.rollout.choose == "adaptive":
        yield "rollout.choose", "'adaptive' goes by rewards that differ in a group, and rollout.group_size is 1"
    is_set = "value_clip" in loss.model_fields_set and loss.value_clip is not None
    if is_set and config.train.updates_per_step * config.train.epochs_per_step == 1:
        where = "used with train.updates_per_step or train.epochs_per_step above 1 only"
        yield "loss.value_clip", f"{where}: else a value moves once in a step"


def untrainable(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, message) for settings that allow evaluation but not training."""
    yield from _of_each_source(config, _untrainable)


def _untrainable(config: RunConfig) -> Iterator[tuple[str, str]]:
    if not config.engine.can_train and config.learner.trains_weights:
        cure = "choose another, or learner=prompt, which searches for a better prompt"
        yield "engine", f"{config.engine.name!r} samples from its own model and cannot be trained; {cure}"
    is_on_server = isinstance(config.learner, schema.TinkerLearnerConfig)
    if isinstance(config.engine, schema.TinkerEngineConfig) and not is_on_server:
        yield "engine", "'tinker' samples from weights on a server, where learner=tinker trains them; set both"
    if config.rollout.group_size == 1 and config.learns_by.compares_attempts and config.learns_by.needs_rewards:
        yield "rollout.group_size", "1 gives nothing to compare an attempt with; set it to 2 or more"
    elif config.rollout.group_size == 1 and ranks(config.judge):
        why = "ranks the attempts of a group against each other, and rollout.group_size is 1; set that to 2 or more"
        yield "judge", f"{config.judge.name!r} {why}"
    if config.rollout.sampling.temperature == 0 and config.learner.trains_weights:
        yield "rollout.sampling.temperature", "at 0 all attempts are the same; set it to 1 to train"
