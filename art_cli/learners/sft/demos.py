"""Demos: chat transcripts to learn from, read and made into samples, assistant tokens only. No torch."""

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from art_cli.chat.control_tokens import ControlTokens, Guard, controls_of
from art_cli.learners.samples import Ints, Sample, bare_sample
from art_cli.runs.durable import read_lines
from art_cli.runtime.errors import DataError, LearnerError, describe
from art_cli.runtime.plugins import resolve

log = logging.getLogger(__name__)
Json = dict[str, Any]


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """One transcript in OpenAI's format; other keys are ignored.

    Example: Demo(messages=[{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}])
    """

    messages: list[Json]
    tools: list[Json] = []

    def __post_init__(self) -> None:
        if not all(isinstance(message.get("role"), str) for message in self.messages):
            raise ValueError('every message needs a "role"')
        if not any(message["role"] == "assistant" for message in self.messages):
            raise ValueError("no assistant message to learn from")


class DemoLine(Demo, frozen=True, kw_only=True):
    """A transcript on a line of a file, which must not be an attempt with the tokens that were sampled."""

    group_size: Any = None  # an attempt that art played has both; one of another tool may have no turns
    turns: Any = None

    def __post_init__(self) -> None:
        if self.group_size is not None and self.turns:
            raise ValueError(
                "an attempt, not a transcript: the messages of good and bad attempts would be learned from alike; "
                "--best-of (sft.best_of) learns from the best scored ones of each group"
            )
        super().__post_init__()


def load_demos(spec: str, directory: Path) -> list[Json]:
    """Returns the transcripts of a JSON-lines file, or those that "file.py:function" returns, in order.

    Paths are relative to `directory`. Raises DataError for a missing file, a line or item that is not a transcript,
    no transcripts, or attempts, of which only the good ones are worth learning; UsageError if the function cannot be
    loaded.
    """
    path = directory / spec
    if path.is_file():
        demos: list[Demo] = list(read_lines(path, DemoLine))
    elif ":" in spec:
        demos = _call(spec, directory)
    else:
        raise DataError("no such file; `sft.demos` names a JSON-lines file or 'file.py:function'", path)
    if not demos:
        raise DataError("no transcripts; at least one is needed", spec)
    return [{"messages": demo.messages, "tools": demo.tools} for demo in demos]


def _call(spec: str, directory: Path) -> list[Demo]:
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


def _convert(item: object, source: str) -> Demo:
    try:
        return msgspec.convert(item, Demo)
    except msgspec.ValidationError as error:
        raise DataError(str(error), source) from None


def demo_samples(demo: Json, tokenizer: Any, *, name: str, max_length: int) -> list[Sample]:
    """Returns the samples of a transcript `{"messages": [...], "tools": [...]}`. It trains each assistant message once.

    A message is rendered as it will be sampled. The prompt is the conversation before it with the template's generation
    prompt. The reply is what the template then adds for the message, up to its stop token. A message whose prompt
    continues the previous sample joins that sample. A template may render old messages differently (some drop old
    reasoning); the message then starts another sample.

    Markers in the texts are learned as text (control_tokens.py), calls of `tool_calls` as the template writes them.

    Raises LearnerError for no assistant message, too many tokens, or a template whose reply does not continue its
    prompt.
    """
    controls = controls_of(tokenizer)
    guard = Guard(controls, demo)
    messages, tools = guard.messages(demo["messages"]), guard.value(demo.get("tools")) or None
    for given, guarded in zip(demo["messages"], messages, strict=True):
        if given is not guarded and given["role"] == "assistant":
            kept = controls.marks_in(str(guarded.get("content")))
            for mark in {mark for mark in controls.marks_in(str(given.get("content"))) if mark not in kept}:
                _warn_of(mark)
    samples: list[Sample] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"{name}, message {index + 1}"
        token_ids, start = _render_turn(messages[: index + 1], tools, guard, controls, where)
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
    messages: list[Json], tools: list[Json] | None, guard: Guard, controls: ControlTokens, where: str
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
    stop = controls.tokenizer.eos_token_id
    if stop in reply_ids:  # the engine stops there, so it never samples what the template adds behind it
        reply_ids = reply_ids[: reply_ids.index(stop) + 1]
    return np.asarray(prompt_ids + reply_ids, dtype=np.int64), len(prompt_ids)
