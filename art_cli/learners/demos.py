"""Chat transcripts made into samples for supervised training: assistant tokens only. No torch."""

from typing import Any

import numpy as np

from art_cli.errors import LearnerError
from art_cli.learners.samples import Ints, Sample, bare_sample


def demo_samples(demo: dict[str, Any], tokenizer: Any, *, name: str, max_length: int) -> list[Sample]:
    """The samples of a transcript `{"messages": [...], "tools": [...]}`: each assistant message is trained once.

    A message is rendered as it will be sampled: the prompt is the conversation before it with the template's generation
    prompt, the reply is what the template then adds for it, up to its stop token. A message that goes on from the last
    one's tokens joins its sample; one whose conversation renders differently (a template that drops old reasoning)
    starts another.

    Raises LearnerError: no assistant message, too long, or a template whose reply does not go on from its prompt.
    """
    messages, tools = demo["messages"], demo.get("tools") or None
    samples: list[Sample] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"{name}, message {index + 1}"
        token_ids, start = _render_turn(messages[: index + 1], tools, tokenizer, where)
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


def _render_turn(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, tokenizer: Any, where: str
) -> tuple[Ints, int]:
    """The tokens of the conversation up to the stop token of its last message, and where that message begins."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    if not whole.startswith(prompt) or whole == prompt:
        raise LearnerError(
            f"{where}: the chat template's rendering of this reply does not go on from its prompt; "
            "set model.chat_template to one that does"
        )
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    reply_ids = tokenizer(whole[len(prompt) :], add_special_tokens=False).input_ids
    stop = tokenizer.eos_token_id
    if stop in reply_ids:  # what the template puts behind it is never sampled
        reply_ids = reply_ids[: reply_ids.index(stop) + 1]
    return np.asarray(prompt_ids + reply_ids, dtype=np.int64), len(prompt_ids)
