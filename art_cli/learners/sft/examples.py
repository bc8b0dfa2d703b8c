"""Examples for a supervised warm-up: read from files, divided, and converted to samples. No torch.

An example is plain JSON: a chat transcript {"messages": [...], "tools": [...]} (transcripts.py), where only assistant
tokens are trained, or an attempt by the policy, including its tokens {"id": ..., "scenario": ..., "turns": [...]}.

Attempts are the best in scored groups (`best_attempts`): rejection sampling as in RAFT, Dong et al. 2023
(arXiv:2304.06767), and Llama 2 (arXiv:2307.09288, section 3.2.3). Training uses the sampled tokens, never re-rendered
messages.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from art_cli.models.tokenizer import stop_ids, template_cure
from art_cli.rollouts.scenario_files import is_held_out
from art_cli.runs.durable import read_lines, read_numbered
from art_cli.runs.feedback import DEMONSTRATION, FeedbackEntry, latest
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Trajectory, Turn, by_group
from art_cli.runtime.errors import DataError, LearnerError, describe
from art_cli.runtime.plugins import resolve

Json = dict[str, Any]

log = logging.getLogger(__name__)


def load_demos(spec: str, directory: Path) -> list[Json]:
    """Returns the transcripts from a JSON-lines file, or returned by "file.py:function", in order.

    Each has a `source` for error messages, "demos.jsonl:3" or "file.py:function, item 3".

    Paths are relative to `directory`. Raises DataError for a missing file, an invalid transcript, an empty result, or
    attempts (only the good attempts are worth learning); UsageError if the function cannot be loaded.
    """
    path = directory / spec
    if path.is_file():
        demos = [(f"{path}:{line}", demo) for line, demo in read_numbered(path, Transcript)]
    elif ":" in spec:
        demos = _call(spec, directory)
    else:
        raise DataError("no such file; `sft.demos` names a JSON-lines file or 'file.py:function'", path)
    if not demos:
        raise DataError("no transcripts; at least one is needed", spec)
    return [{"messages": demo.messages, "tools": demo.tools, "source": source} for source, demo in demos]


def without_source(example: Json) -> Json:
    """Returns the example's content, which does not depend on where it was read."""
    return {key: value for key, value in example.items() if key != "source"}


def _call(spec: str, directory: Path) -> list[tuple[str, Transcript]]:
    make = resolve(spec, base=directory)
    try:
        items = make() if callable(make) else make
        if not isinstance(items, Iterable):
            raise DataError(f"expected an iterable of transcripts, not {type(items).__name__}", spec)
        named = ((f"{spec}, item {number}", item) for number, item in enumerate(items, 1))
        return [(name, _convert(item, name)) for name, item in named]
    except DataError:
        raise
    except Exception as error:  # boundary to the user's function
        raise DataError(f"it raised {describe(error)}", spec) from error


def _convert(item: object, source: str) -> Transcript:
    try:
        return msgspec.convert(item, Transcript)
    except msgspec.ValidationError as error:
        raise DataError(str(error), source) from None


def demo_samples(
    demo: Json, tokenizer: Any, *, name: str, max_length: int, stops: Collection[int] = ()
) -> list[Sample]:
    """Returns a transcript's samples. Every assistant message is trained once, unless its `weight` is 0.

    `demo` is `{"messages": [...], "tools": [...]}`. A message is rendered the way it will be sampled. The prompt is the
    preceding conversation plus the template's generation prompt. The reply is the text that the template then adds, up
    to the earliest of `stops`, where the engine ends a reply (default: the tokenizer's stop ids; see
    models/loading.py). A message whose prompt continues the previous sample joins that sample. If the template renders
    old messages differently (some drop old reasoning), the message starts another sample.

    Special markers inside texts are learned as plain text (control_tokens.py); `tool_calls` are learned as the template
    writes them.

    Raises LearnerError if assistant messages are missing, a sample is too long, a text cannot be encoded, or a rendered
    reply does not continue its prompt.
    """
    controls, stops = controls_of(tokenizer), stops or stop_ids(tokenizer)
    try:  # the messages in the form that sampling passes to the template
        prepared = [for_template({**message, "weight": None}) for message in demo["messages"]]
        guard = Guard(controls, prepared, demo)
        messages, tools = guard.messages(prepared), guard.value(demo.get("tools")) or None
    except ChatError as error:
        raise LearnerError(f"{name}: {error.message}") from error
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
    """Returns token ids up to the last message's stop token, and the index where the last message begins."""
    render = controls.tokenizer.apply_chat_template
    try:
        prompt = render(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
        whole = render(messages, tools=tools, tokenize=False)
    except Exception as error:  # boundary to the model's chat template
        raise LearnerError(f"{where}: the chat template refuses the conversation: {describe(error)}") from error
    if not whole.startswith(prompt) or whole == prompt:
        raise LearnerError(
            f"{where}: the chat template does not render this reply as a continuation of its prompt; "
            "set another model.chat_template"
        )
    reply = whole[len(prompt) :]
    if _leaves_calls_out(render, messages, tools, whole):
        cure = f"{template_cure(controls.tokenizer)} in model.chat_template"
        raise LearnerError(f"{where}: the chat template leaves out its tool calls, so no call would be learned; {cure}")
    try:
        prompt_ids, reply_ids = controls.encode(prompt, guard), controls.encode(reply, guard)
    except (ValueError, TypeError) as error:  # the tokenizer raises TypeError for text that is not Unicode
        raise LearnerError(f"{where}: {describe(error)}") from error
    # The engine never samples the tokens that the template adds after a stop token.
    end = next((place for place, id in enumerate(reply_ids, 1) if id in stops), None)
    reply_ids = reply_ids[:end]
    return np.asarray(prompt_ids + reply_ids, dtype=np.int64), len(prompt_ids)


def _leaves_calls_out(render: Callable[..., str], messages: list[Json], tools: list[Json] | None, whole: str) -> bool:
    """Returns whether the template renders the last message as if it had no tool calls."""
    *before, last = messages
    if not last.get("tool_calls"):
        return False
    bare = {key: value for key, value in last.items() if key != "tool_calls"}
    try:
        return render([*before, bare], tools=tools, tokenize=False) == whole
    except Exception:  # boundary to the model's chat template, which may want calls or a text
        return False


class ScoredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The trainable part of an attempt. Example: ScoredAttempt(id="t7", scenario="easy-17", turns=[Turn(...)])"""

    id: str
    scenario: str  # scenario id; the group id if the record has no scenario id
    turns: list[Turn]


def scored_files(path: Path) -> list[Path]:
    """Returns a scored file itself, or all scored files in a run directory, ordered by step."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("step_*/scored.jsonl"), key=lambda file: (len(file.parent.name), file.parent.name))


def best_attempts(path: Path, num: int, *, min_reward: float | None = None) -> list[Json]:
    """Returns each group's best `num` attempts from a scored file or run directory, as examples, group by group.

    An attempt needs a reward of at least `min_reward`. Without `min_reward` it must beat the group's worst attempt, so
    a group with equal rewards gives no examples. Ties go to the lower index. Attempts with an error or without sampled
    tokens are dropped. An attempt with an edited reply in the feedback next to the file (runs/feedback.py) gives the
    edited reply instead of itself. Raises DataError if the file, rewards or tokens are missing.
    """
    if not path.exists():
        raise DataError("no such file; best_of needs a scored file or the directory of a run", path)
    files = scored_files(path)
    if not files:
        raise DataError("no scored trajectories there; a run has them in step_*/scored.jsonl", path)
    return [example for file in files for example in _best_of_file(file, num, min_reward)]


def _best_of_file(path: Path, num: int, min_reward: float | None) -> Iterator[Json]:
    feedback = latest(path.parent)
    for group in by_group(read_lines(path, ScoredTrajectory)).values():
        edited = {each.id: demos for each in group if (demos := _edited(each, feedback.get(each.id, ())))}
        yield from _best([each for each in group if each.id not in edited], num, min_reward, path)
        for demos in edited.values():
            yield from demos


def _edited(trajectory: Trajectory, feedback: Sequence[FeedbackEntry]) -> list[Json]:
    """Returns a transcript per demonstration: the messages before the reply, not learned, and the edited reply."""
    found = []
    for entry in feedback:
        replies = trajectory.metadata.get("replies")
        num = replies.get(entry.reply) if isinstance(replies, dict) else None
        if entry.metric != DEMONSTRATION or not isinstance(num, int):
            continue
        longer = [each[:num] for each in (trajectory.messages, *trajectory.branches) if len(each) > num >= 0]
        if not longer or any(before != longer[0] for before in longer):
            log.warning("%s: its edited reply is left out, because its prompt is not known", trajectory.id)
            continue
        shown = [{**each, "weight": 0} if each.get("role") == "assistant" else each for each in longer[0]]
        demo = _convert({"messages": [*shown, entry.value], "tools": trajectory.tools}, f"feedback {entry.id}")
        found.append({"messages": demo.messages, "tools": demo.tools})
    return found


def _best(group: Sequence[ScoredTrajectory], num: int, min_reward: float | None, path: Path) -> list[Json]:
    rewarded = [(_reward(each, path), each) for each in group if each.error is None]
    worst = min((reward for reward, _ in rewarded), default=0.0)
    chosen = [
        (reward, trajectory)
        for reward, trajectory in rewarded
        if (reward - worst > EQUAL_REWARDS if min_reward is None else reward >= min_reward)
        and count_sampled(trajectory)[0]
    ]
    chosen.sort(key=lambda pair: -pair[0])  # a stable sort, so equal rewards stay in index order
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
    """Examples to train on, and held-out examples for measuring the loss."""

    trained: list[Json]
    evaluated: list[Json]


def load_examples(config: SftConfig, directory: Path, sources: Sequence[str] = ()) -> Examples:
    """Returns the examples for an `sft` section, in order. `sources` replace its `demos`.

    Raises DataError if examples cannot be read, or none are left to train or evaluate on; UsageError if a function
    cannot be loaded.
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
    """Returns the key to split examples by, as eval.held_out does: the scenario, or a hash of the transcript."""
    if "turns" in example:
        return str(example["scenario"])
    return hashlib.sha256(json.dumps(without_source(example), sort_keys=True, default=repr).encode()).hexdigest()


def example_samples(
    example: Json, tokenizer: Any, *, name: str, max_length: int, vocabulary: int, stops: Collection[int] = ()
) -> list[Sample]:
    """Returns an example's samples, with cross-entropy weight 1 for every token the policy should write.

    `name` identifies a transcript without a `source` in errors; attempts have ids. An attempt's tokens are trained at
    their sampling temperature, as in a policy step. `vocabulary` is the model's vocabulary size. Raises LearnerError if
    the example cannot be trained on.
    """
    if "turns" not in example:
        name = example.get("source", name)
        return demo_samples(example, tokenizer, name=name, max_length=max_length, stops=stops)
    attempt = msgspec.convert(example, ScoredAttempt)
    record = Trajectory(id=attempt.id, group_id="", group_size=1, index=0, turns=attempt.turns)
    samples = trajectory_samples(record, token_weights(record, Credit(cross_entropy=1.0)))
    check_fits(samples, max_length=max_length, vocabulary=vocabulary)
    if not samples:
        raise LearnerError(f"trajectory {attempt.id}: no sampled token to learn from")
    return samples
