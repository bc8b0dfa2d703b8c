"""A run's policy: its weights or spec, its origin, and the engine's copy of the weights."""

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import GrpoConfig, RunConfig
from art_cli.engines import EngineTraits
from art_cli.learners import describe_processes, has_own_weights, load_policy
from art_cli.loop.decide import Decided, computes_here, describe
from art_cli.loop.policy_sampler import read_origin
from art_cli.models.policy_spec import PolicySpec, read_spec, spec_of
from art_cli.models.weights import Weights, clone_trainable, count_parameters
from art_cli.runs.manifest import Origin


def load_run_policy(decided: Decided) -> tuple[PolicySpec | None, Weights | None]:
    """Returns the policy's spec, and its weights if this process needs them; (None, None) if the engine brings its
    model."""
    config, base = decided.loaded.config, decided.base
    if base is None:
        return None, None
    if computes_here(config, decided.traits):
        weights = load_policy(config, base)
        return spec_of(weights), weights
    learner, is_remote = config.learner, config.learner.weights == "server"
    spec = read_spec(config.model, base, device=None if is_remote else learner.device, is_remote=is_remote)
    return msgspec.structs.replace(spec, learner_gpus=learner.processes), None


async def find_origin(config: RunConfig, policy: PolicySpec | None) -> Origin | None:
    """Returns the origin of all the run's policies; None for prompts."""
    if policy is None or not config.learner.trains_weights:
        return None
    return await read_origin(policy)


def shares_weights(config: RunConfig) -> bool:
    """Returns True if engine and learner take turns with one copy of the weights (on-policy)."""
    return config.train.max_staleness == 0 and not has_own_weights(config)


def engine_weights(config: RunConfig, traits: EngineTraits, weights: Weights | None) -> Weights | None:
    """Returns the engine's copy of the weights, if the engine computes in this process."""
    if weights is None or traits.weights != "here":
        return None
    return weights if has_own_weights(config) or shares_weights(config) else clone_trainable(weights)


def describe_run(loaded: LoadedConfig, policy: PolicySpec | None, weights: Weights | None) -> str:
    config = loaded.config
    if policy is None or not config.learner.trains_weights:
        return f"{config.name}: {config.model.base} with a prompt; {describe(loaded)}"
    why = {name: f" (auto: {reason})" for name, reason in loaded.auto.items()}
    rate = f"learning rate {config.train.rate:g}{why.get('learning_rate', '')}"
    if config.train.kl_bound is not None:
        rate += f"; a step's KL at most {config.train.kl_bound:g}{why.get('max_kl', '')}"
    if isinstance(config.learns_by, GrpoConfig) and config.learns_by.baseline == "shrunk":
        rate += f"; baseline shrunk{why.get('baseline', '')}"
    what = config.model.base
    if weights is not None:
        size = count_parameters(weights.model)
        what += f", {size.whole / 1e6:.3g}M parameters, {size.trained / 1e6:.3g}M trained"
    engine, learner = config.engine, config.learner.name
    names = f"engine {engine.title}, learner {learner} on {policy.learner_device}"
    if engine.server is not None:
        names = f"engine {engine.title}, learner {learner} at {engine.server[0]}"
    elif has_own_weights(config):
        names += f" in {describe_processes(config)}"
    return f"{config.name}: {what}; {names}; {rate}"
