"""Examples: what a supervised warm-up learns from, read from files, divided, and made into samples. No torch.

An example is plain JSON: a chat transcript {"messages": [...], "tools": [...]} (transcripts.py), whose assistant tokens
alone are trained, or an attempt by the policy, with its tokens {"id": ..., "scenario": ..., "turns": [...]}.

The attempts are the best of scored groups (`best_attempts`): rejection sampling as in RAFT, Dong et al. 2023
(arXiv:2304.06767), and Llama 2 (arXiv:2307.09288, section 3.2.3). An attempt is learned from with the tokens that the
policy sampled, never with its messages rendered again.
"""

import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.control_tokens import ControlTokens, Guard, controls_of
from art_cli.chat.template_messages import for_template
from art_cli.config.schema import SftConfig
from art_cli.learners.samples import (
    Credit,
    Ints,
    Sample,
    bare_sample,
    check_fits,
    count_sampled,
    token_weights,
    trajectory_samples,
)
from art_cli.learners.sft.transcripts import Transcript, is_learned
from art_cli.models.tokenizer import stop_ids
from art_cli.rollouts.scenario_files import is_held_out
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Trajectory, Turn
from art_cli.runtime.errors import DataError, LearnerError, describe
from art_cli.runtime.plugins import resolve

Json = dict[str, Any]

log = logging.getLogger(__name__)


def load_demos(spec: str, directory: Path) -> list[Json]:
    """Returns the transcripts of a JSON-lines file, or those that "file.py:function" returns, in order.

    Paths are relative to `directory`. Raises DataError for a missing file, a line or item that is not a transcript,
    no transcripts, or attempts, of which only the good ones are worth learning; UsageError if the function cannot be
    loaded.
    """
    path = directory / spec
    if path.is_file():
        demos = list(read_lines(path, Transcript))
    elif ":" in spec:
        demos = _call(spec, directory)
    else:
        raise DataError("no such file; `sft.demos` names a JSON-lines file or 'file.py:function'", path)
    if not demos:
        raise DataError("no transcripts; at least one is needed", spec)
    return [{"messages": demo.messages, "tools": demo.tools} for demo in demos]


def _call(spec: str, directory: Path) -> list[Transcript]:
    make = resolve(spec, base=directory)
    try:
        items = make() if callable(make) else make
        if not isinstance(items, Iterable):
            raise DataError(f"expected an iterable of transcripts, not {type(items).__name__}", spec)
        return [_convert(item, f"{spec}, item {number}") for number, item in enumerate(items, 1)]
    except DataError:
        raise
    except Exception as error:  # the boundary to the user's function
        raise DataError(f"it raised {describe(error)}", spec) from error


def _convert(item: object, source: str) -> Transcript:
    try:
        return msgspec.convert(item, Transcript)
    except msgspec.ValidationError as error:
        raise DataError(str(error), source) from None


def demo_samples(
    demo: Json, tokenizer: Any, *, name: str, max_length: int, stops: Collection[int] = ()
) -> list[Sample]:
    """Returns the samples of a transcript `{"messages": [...], "tools": [...]}`. It trains each assistant message once,
    except a message whose `weight` is 0.

    A message is rendered as it will be sampled. The prompt is the conversation before it with the template's generation
    prompt. The reply is what the template then adds for the message, up to the first of `stops`, where the engine ends
    a reply (models/tokenizer.py; those of the tokenizer if not given). A message whose prompt continues the previous
    sample joins that sample. A template may render old messages differently (some drop old reasoning); the message
    then starts another sample.

    Markers in the texts are learned as text (control_tokens.py), calls of `tool_calls` as the template writes them.

    Raises LearnerError for no assistant message, too many tokens, or a template whose reply does not continue its
    prompt.
    """
    controls, stops = controls_of(tokenizer), stops or stop_ids(tokenizer)
    prepared = _prepare(demo["messages"], name)
    guard = Guard(controls, prepared, demo)
    messages, tools = guard.messages(prepared), guard.value(demo.get("tools")) or None
    for given, guarded in zip(prepared, messages, strict=True):
        if given is not guarded and given["role"] == "assistant":
            kept = controls.marks_in(str(guarded.get("content")))
            for mark in {mark for mark in controls.marks_in(str(given.get("content"))) if mark not in kept}:
                _warn_of(mark)
    samples: list[Sample] = []
    for index, message in enumerate(demo["messages"]):
        if not is_learned(message):
            continue
        where = f"{name}, message {index + 1}"
        token_ids, start = _render_turn(messages[: index + 1], tools, guard, controls, stops, where)
        if len(token_ids) > max_length:
            raise LearnerError(f"{where}: {len(token_ids)} tokens, over the model's {max_length}; shorten or drop it")
        targets = np.arange(start, len(token_ids))
        previous = samples[-1].token_ids if samples else np.empty(0, dtype=np.int64)
        if samples and np.array_equal(token_ids[: len(previous)], previous):
            targets = np.concatenate([samples.pop().targets, targets])
        samples.append(bare_sample(token_ids, targets, name, turn=index))
    if not samples:
        raise LearnerError(f"{name}: no assistant message to learn from")
    return samples


def _prepare(messages: Sequence[Json], name: str) -> list[Json]:
    """Returns the messages as sampling gives them to the template."""
    try:
        return [for_template({**message, "weight": None}) for message in messages]
    except ChatError as error:
        raise LearnerError(f"{name}: {error.message}") from error


@cache
def _warn_of(mark: str) -> None:
    log.warning("sft: an assistant's text holds %s, which is learned as text; calls belong into tool_calls", mark)


def _render_turn(
    messages: list[Json],
    tools: list[Json] | None,
    guard: Guard,
    controls: ControlTokens,
    stops: Collection[int],
    where: str,
) -> tuple[Ints, int]:
    """Returns the tokens of the conversation up to the last message's stop token, and the index where that begins."""
    render = controls.tokenizer.apply_chat_template
    try:
        prompt = render(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
        whole = render(messages, tools=tools, tokenize=False)
    except Exception as error:  # the boundary to the model's own template
        raise LearnerError(f"{where}: the chat template refuses the conversation: {describe(error)}") from error
    if not whole.startswith(prompt) or whole == prompt:
        raise LearnerError(
            f"{where}: the chat template's rendering of this reply does not go on from its prompt; "
            "set model.chat_template to one that does"
        )
    try:
        prompt_ids, reply_ids = controls.encode(prompt, guard), controls.encode(whole[len(prompt) :], guard)
    except ValueError as error:
        raise LearnerError(f"{where}: {describe(error)}") from error
    # The engine never samples what the template adds behind a stop token.
    end = next((place for place, id in enumerate(reply_ids, 1) if id in stops), None)
    reply_ids = reply_ids[:end]
    return np.asarray(prompt_ids + reply_ids, dtype=np.int64), len(prompt_ids)


class ScoredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one attempt to learn from. Example: ScoredAttempt(id="t7", scenario="easy-17", turns=[Turn(...)])"""

    id: str
    scenario: str  # id of its scenario; that of its group, where the record names none
    turns: list[Turn]


def scored_files(path: Path) -> list[Path]:
    """Returns a scored file itself, or all scored files of a run directory, in the order of their steps."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("step_*/scored.jsonl"), key=lambda file: (len(file.parent.name), file.parent.name))


def best_attempts(path: Path, num: int, *, min_reward: float | None = None) -> list[Json]:
    """Returns the best `num` attempts of each group of a scored file or run directory, as examples, group by group.

    An attempt must have at least `min_reward`, or if that is None more than the worst attempt of its group, so that a
    group of equal rewards gives none. Of equal rewards the lower index comes first. Attempts with an error, and those
    that sampled nothing, are left out. Raises DataError if the file, rewards or tokens are missing.
    """
    if not path.exists():
        raise DataError("no such file; best_of needs a scored file or the directory of a run", path)
    files = scored_files(path)
    if not files:
        raise DataError("no scored trajectories there; a run has them in step_*/scored.jsonl", path)
    return [example for file in files for group in _groups(file) for example in _best(group, num, min_reward, file)]


def _groups(path: Path) -> Iterable[Sequence[ScoredTrajectory]]:
    """Returns each group's attempts in the order of their indexes; of one written twice, the last line counts."""
    groups: dict[str, dict[int, ScoredTrajectory]] = {}
    for trajectory in read_lines(path, ScoredTrajectory):
        groups.setdefault(trajectory.group_id, {})[trajectory.index] = trajectory
    return [[members[index] for index in sorted(members)] for members in groups.values()]


def _best(group: Sequence[ScoredTrajectory], num: int, min_reward: float | None, path: Path) -> list[Json]:
    rewarded = [(_reward(each, path), each) for each in group if each.error is None]
    worst = min((reward for reward, _ in rewarded), default=0.0)
    chosen = [
        (reward, trajectory)
        for reward, trajectory in rewarded
        if (reward - worst > EQUAL_REWARDS if min_reward is None else reward >= min_reward)
        and count_sampled(trajectory)[0]
    ]
    chosen.sort(key=lambda pair: -pair[0])  # a stable sort, so equal rewards stay in the order of their indexes
    return [_example(trajectory) for _, trajectory in chosen[:num]]


def _reward(trajectory: ScoredTrajectory, path: Path) -> float:
    name = f"trajectory {trajectory.id}"
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise DataError(f"{name}: its reward is {trajectory.reward}; score the file first with art judge", path)
    if not trajectory.turns and not trajectory.is_silent:
        raise DataError(
            f"{name}: no token ids, so another tool or an endpoint's own model made it; play it with art generate, or "
            "learn from its messages without --best-of",
            path,
        )
    return trajectory.reward


def _example(trajectory: Trajectory) -> Json:
    scenario = trajectory.scenario.get("id", trajectory.group_id)
    attempt = ScoredAttempt(id=trajectory.id, scenario=str(scenario), turns=trajectory.turns)
    example: Json = msgspec.to_builtins(attempt)
    return example


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


def example_samples(
    example: Json, tokenizer: Any, *, name: str, max_length: int, vocabulary: int, stops: Collection[int] = ()
) -> list[Sample]:
    """Returns the samples of an example, with weight 1 in the cross entropy of every token that the policy is to write.

    `name` is that of a transcript in messages; an attempt has its own. An attempt's tokens are trained at the
    temperature at which they were sampled, as in a policy step. `vocabulary` is the model's number of tokens. Raises
    LearnerError: an example that cannot be trained on.
    """
    if "turns" not in example:
        return demo_samples(example, tokenizer, name=name, max_length=max_length, stops=stops)
    attempt = msgspec.convert(example, ScoredAttempt)
    record = Trajectory(id=attempt.id, group_id="", group_size=1, index=0, turns=attempt.turns)
    samples = trajectory_samples(record, token_weights(record, Credit(cross_entropy=1.0)))
    check_fits(samples, max_length=max_length, vocabulary=vocabulary)
    if not samples:
        raise LearnerError(f"trajectory {attempt.id}: no sampled token to learn from")
    return samples
