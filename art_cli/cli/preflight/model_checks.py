"""Model checks: loading, equal logprobs in engine and learner, one update, disk space."""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from art_cli.cli import Finding
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.config.schema import TinkerEngineConfig
from art_cli.engines import engine_traits
from art_cli.learners import Learner, describe_processes, has_own_weights, make_learner
from art_cli.loop import trial_update
from art_cli.loop.decide import Decided, computes_here, decide_by_base, read_sizes
from art_cli.loop.engine_choice import Machine
from art_cli.loop.gpu_fit import describe_use, find_misfit, gpu_use
from art_cli.loop.open_run import read_policy
from art_cli.models.base_source import find_base
from art_cli.models.device import memory_there
from art_cli.models.loading import import_libraries
from art_cli.models.model_shape import read_shape
from art_cli.models.policy_spec import read_spec, tokenizer_of
from art_cli.models.tokenizer import templated_tokenizer
from art_cli.models.weights import count_parameters
from art_cli.runs.trajectory import Turn, prompt, sequence

log = logging.getLogger(__name__)

LONG_ROW_S = 60.0  # a longer estimate gets a cure
FIRST_STEP = 10  # time of the first step in forward passes: 3 for the step, the rest for the check of packed rows


def open_model(opened: Opened) -> tuple[Opened, Finding]:
    """Loads the weights, unless other processes do, and creates the learner."""
    loaded, directory = opened.loaded, opened.loaded.directory
    name = loaded.config.model.title
    if not loaded.config.engine.can_train:
        learner = make_learner(loaded.config, None, directory=directory)
        return replace(opened, learner=learner), Finding("model", True, f"{name}, whose prompt is searched for")
    traits = engine_traits(loaded.config.engine, directory)
    if computes_here(loaded.config, traits) and not loaded.config.learner.imports_first:
        import_libraries(has_adapter=loaded.config.model.lora is not None)
    base = find_base(loaded.config.model.base, directory=directory, built=opened.scratch / "base")
    loaded = decide_by_base(loaded, base)
    opened, config = replace(opened, loaded=loaded), loaded.config
    if isinstance(config.engine, TinkerEngineConfig):
        return _open_remote(opened, config.engine, base)
    note = ""
    if (sized := read_sizes(loaded, read_shape(base), Machine())) is not None:
        if (misfit := find_misfit(config, *sized)) is not None:
            cure = misfit.cure or "take a smaller model, or more GPUs"
            return opened, Finding("model", False, misfit.problem, cure)
        note = describe_use(gpu_use(config, *sized), sized.model)
    policy, weights = read_policy(Decided(loaded, traits, base))
    assert policy is not None, "the engine does not bring its model"
    # A second epoch or a second node would show nothing new.
    once = config.train.model_copy(update={"epochs_per_step": 1})
    alone = config.learner.model_copy(update={"nodes": 1}) if config.learner.nodes > 1 else config.learner
    config = config.model_copy(update={"train": once, "learner": alone})
    learner = make_learner(config, weights or policy, directory=directory)
    where = f"{policy.max_length} tokens of context, on {policy.learner_device}"
    if weights is None:
        tokenizer: Any = templated_tokenizer(config.model, base)
        message = f"{name}: {where} in {describe_processes(config)}"
    else:
        tokenizer, message = weights.tokenizer, f"{name}: {count_parameters(weights.model)}, {where}"
    opened = replace(opened, weights=weights, policy=policy, tokenizer=tokenizer, learner=learner)
    return opened, Finding("model", True, f"{message}{note}")


def _open_remote(opened: Opened, engine: TinkerEngineConfig, base: str) -> tuple[Opened, Finding]:
    """Looks for the model on the server. Locally, only its configuration and tokenizer are read."""
    from art_cli.tinker.client.remote_server import find_server, load_sdk

    config = opened.loaded.config
    policy = read_spec(config.model, base, is_remote=True)
    version = load_sdk().__version__
    server, name = find_server(engine), engine.base_model or config.model.base
    most = server.find_model(name).max_context_length
    if most is not None and policy.max_length > most:
        message = f"{name} at {server.url}: {most} tokens of context, and model.max_length is more"
        return opened, Finding("model", False, message, f"set model.max_length={most}")
    learner = make_learner(config, policy, directory=opened.loaded.directory)
    message = f"{name} at {server.url}, {policy.max_length} tokens of context, tinker {version} here"
    message += "; the server sets the scale of an adapter, not model.lora.alpha"
    opened = replace(opened, policy=policy, tokenizer=tokenizer_of(policy), learner=learner)
    return opened, Finding("model", True, message)


def check_tokens(opened: Opened, part: SourcePart) -> Finding:
    """Compares the logprobs of engine and learner, and the recorded tokens with the re-encoded text."""
    assert opened.policy and opened.learner
    turns = part.played[0].turns
    took = part.played[0].duration_s
    log.info("tokens: the learner scores the first attempt again, in less than the %.0f s that it took", took + 1)
    tokenizer: Any = opened.tokenizer
    last = prompt(turns, len(turns) - 1)
    is_same = tokenizer.encode(tokenizer.decode(last), add_special_tokens=False) == last
    gaps = [gap for index in range(len(turns)) for gap in _gaps(opened.learner, turns, index)] or [0.0]
    num_branches = sum(turn.parent is None or turn.kept < len(sequence(turns, turn.parent)) for turn in turns) - 1
    mean = fmean(gaps)
    message = f"engine and learner differ by {mean:.1e} nats, {max(gaps):.1e} at most, {num_branches} branches"
    if mean > part.loaded.config.train.max_logprob_gap:
        return Finding("tokens", False, message, "engine and learner do not compute the same model")
    cure = "" if is_same else "text and tokens do not map one to one here; recorded tokens are trained on as they are"
    if num_branches:
        cure = "a prompt does not extend the turn before it (edited history, or its template): slower, still right"
    return Finding("tokens", True, message, cure)


def _gaps(learner: Learner, turns: Sequence[Turn], index: int) -> list[float]:
    """Returns |engine - learner| in nats for each sampled token of a turn; [] for a turn with top_p or top_k."""
    turn = turns[index]
    if turn.is_truncated_sampling or not turn.sampled_ids:
        return []
    scores = learner.score(sequence(turns, index), temperature=turn.temperature)
    return [abs(a - b) for a, b in zip(scores[-len(turn.logprobs) :], turn.logprobs, strict=True)]


def check_update(opened: Opened, part: SourcePart) -> Finding:
    """Takes a step on a row as long as the longest played one; estimates the longest row that the limits allow."""
    assert opened.policy and opened.learner
    played = max(len(sequence(attempt.turns, index)) for attempt in part.played for index in range(len(attempt.turns)))
    own_prompt = len(prompt(part.played[0].turns, 0))
    longest = min(opened.policy.max_length, own_prompt + part.loaded.config.rollout.longest_answer)
    length = min(played, longest, trial_update.MAX_TOKENS)
    begin = time.perf_counter()
    opened.learner.score([index % opened.policy.vocabulary for index in range(length)])
    takes_s = FIRST_STEP * (time.perf_counter() - begin)
    log.info("update: a step on a row of %d tokens, about %.0f s", length, takes_s)
    learns_by = part.loaded.config.learns_by
    metrics = trial_update.step(opened.learner, length, vocabulary=opened.policy.vocabulary, parts=learns_by.parts)
    if metrics.num_updates == 0:
        return Finding("update", True, "not tried: this loss learns nothing from made-up attempts")
    message = f"a row of {length} tokens forward and backward in {metrics.train_s:.1f} s"
    if longest <= length or opened.weights is None or has_own_weights(part.loaded.config):
        return Finding("update", True, message)
    second = trial_update.second_length(length, longest)
    most_s = metrics.train_s * (1 + second / length)
    log.info("update: rows of %d and %d tokens, to estimate longer ones: %.0f s at most", length, second, most_s)
    whole = trial_update.forecast(opened.learner, opened.weights, length, longest, parts=learns_by.parts)
    message += f"; the longest row that the limits allow has {longest:,} tokens and would take {whole}"
    is_large = whole.seconds > LONG_ROW_S or (whole.gigabytes or 0.0) > memory_there(opened.weights)
    cure = f"model.max_length makes it shorter: the longest attempt here had {played:,} tokens" if is_large else ""
    return Finding("update", True, message, cure)


def check_disk(opened: Opened, part: SourcePart) -> Finding:
    """Compares free disk space with the estimated size of checkpoints and trajectories."""
    assert opened.learner
    config = part.loaded.config
    checkpoint = opened.scratch / "checkpoint"
    checkpoint.mkdir()
    if config.learner.weights != "server":  # a server stores its own checkpoints
        opened.learner.save(checkpoint)
    one = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    first = part.played[0]
    line = len(json.dumps(first.messages)) + 40 * first.num_sampled + 6 * len(sequence(first.turns, 0))
    num_groups = config.rollout.groups_per_step + config.rollout.num_spare
    lines = 2 * line * config.rollout.group_size * num_groups * config.train.steps
    num_checkpoints = config.train.keep_checkpoints + 3  # also step 0, the best one, and the one being written
    needed = one * num_checkpoints + lines
    existing = next(path for path in [config.runs, *config.runs.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    message = f"about {needed / 1e9:.2f} GB needed under {config.runs}, {free / 1e9:.1f} GB free"
    return Finding("disk", needed < free, message, "" if needed < free else "free some, or set `runs` elsewhere")
