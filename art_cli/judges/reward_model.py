"""RewardModelJudge: a local sequence-classification model scores each conversation with one output.

The model sees the attempt's main conversation, rendered with the tokenizer's chat template. Tool calls that the
template leaves out are written as text. The model is loaded for the first group, or by `open` on a machine with a GPU,
and runs in a thread, in batches sorted by length. A decoder computes a group's common first tokens once. Remote model
code never runs. torch and transformers are imported lazily.
"""

import asyncio
import copy
import inspect
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from art_cli.chat.control_tokens import controls_of
from art_cli.config.sections.judge_config import RewardModelJudgeConfig
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.judge_text import call_text, clean
from art_cli.models.base_source import find_on_hub, hide_progress_bars
from art_cli.models.device import pick_device
from art_cli.runs.manifest import hash_files
from art_cli.runs.trajectory import Json, Score, Trajectory
from art_cli.runtime import gpus
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError, describe

log = logging.getLogger(__name__)

MIN_STEM = 32  # common first tokens of a group from which computing them once pays


class RewardModelJudge(Judge):
    title = "reward_model"

    def __init__(self, config: RewardModelJudgeConfig, directory: Path, *, job: str = "") -> None:
        self.config, self._directory = config, directory
        self._turn, self._computing = asyncio.Lock(), threading.Lock()  # waiting groups occupy no thread
        self._loaded: tuple[Any, Any] | None = None  # model, tokenizer
        self._num_at_once = config.batch_size  # halved when the GPU's memory runs out
        self._failure = ""  # why the model could not be loaded; other groups do not try again
        self._digest: str | None = None

    @property
    def settings(self) -> str:
        """A digest of the model (hub id or file hashes) and the output settings. Reads the weights."""
        deciding = self.config.model_dump(mode="json", include={"label", "activation", "max_length"})
        return make_key(model=self._digest_of_files() or self.config.model, told=deciding)[:12]

    def _digest_of_files(self) -> str:
        """Returns the digest of the model's directory, read once; "" for a hub id."""
        if self._digest is None:
            path = self._directory / self.config.model
            self._digest = make_key(model=hash_files(path)) if path.is_dir() else ""
        return self._digest

    async def open(self) -> None:
        """Loads the model if it may use a GPU. Raises JudgeStopped if loading fails."""
        if self.config.device != "cpu" and gpus.has_gpu(os.environ):
            await asyncio.to_thread(self._load)

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns the selected output as reward. Raises JudgeError if not finite, JudgeStopped if loading fails."""
        if not group:
            return {}
        async with self._turn:
            values = await asyncio.to_thread(self._score, [trajectory.messages for trajectory in group])
            digest = await asyncio.to_thread(self._digest_of_files)
        returned = f"{self.config.model}@{digest[:12]}" if digest else None
        score = partial(Score, judge="reward_model", model=self.config.model, model_returned=returned)
        return {
            trajectory.id: Verdict(reward=value, scores=[score(score=value)])
            for trajectory, value in zip(group, values, strict=True)
        }

    def _score(self, conversations: Sequence[Sequence[Json]]) -> list[float]:
        """Returns [G] the score of each conversation."""
        with self._computing:  # the thread of a timed-out group may still be running
            return self._compute(conversations)

    def _compute(self, conversations: Sequence[Sequence[Json]]) -> list[float]:
        import torch

        model, tokenizer = self._load()
        longest = _longest(self.config.max_length, model, tokenizer)
        name = self.config.model
        rows = [tuple(conversation_ids(tokenizer, each, longest, name=name)) for each in conversations]
        different = [*dict.fromkeys(rows)]  # equal conversations get equal scores, without rounding
        try:
            with torch.inference_mode():
                scores = dict(zip(different, self._run(model, tokenizer, different), strict=True))
        except torch.OutOfMemoryError as error:
            longest = max(map(len, rows))
            cure = "set judge.device to cpu, or judge.max_length"
            raise JudgeError(f"{name}: no memory for a conversation of {longest} tokens; {cure}") from error
        except (RuntimeError, IndexError) as error:  # too long for the model
            raise JudgeError(f"{self.config.model}: {describe(error)}") from error
        values = [scores[row] for row in rows]
        if not all(value == value and abs(value) != float("inf") for value in values):
            raise JudgeError(f"{self.config.model}: a score is not a finite number")
        return values

    def _run(self, model: Any, tokenizer: Any, rows: Sequence[tuple[int, ...]]) -> list[float]:
        """Returns the score of each row of tokens."""
        import torch

        values = [0.0] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        stem, cache = _stem(model, rows)

        def score(chosen: list[int]) -> None:
            padded = tokenizer.pad({"input_ids": [list(rows[row][stem:]) for row in chosen]}, return_tensors="pt")
            batch = dict(padded.to(model.device))
            if cache is not None:
                batch["past_key_values"] = copy.deepcopy(cache)
                batch["past_key_values"].batch_repeat_interleave(len(chosen))
                batch["attention_mask"] = torch.nn.functional.pad(batch["attention_mask"], (stem, 0), value=1)
            elif _reads_cache(model):
                batch["use_cache"] = False  # keys and values that nothing reads
            logits = model(**batch).logits.float()  # [B, labels]
            for row, value in zip(chosen, self._activate(logits).tolist(), strict=True):
                values[row] = value

        start = 0
        while start < len(rows):
            chosen = by_length[start : start + self._num_at_once]
            try:
                score(chosen)
                start += len(chosen)
            except torch.OutOfMemoryError:
                if len(chosen) == 1:
                    raise
                self._num_at_once = len(chosen) // 2
                log.info("%s: memory for %d conversations at once", self.config.model, self._num_at_once)
        return values

    def _activate(self, logits: Any) -> Any:
        """Returns [B] the selected label's score."""
        if self.config.label >= logits.shape[-1]:
            raise JudgeStopped(
                f"judge.label {self.config.label}: {self.config.model} has {logits.shape[-1]} outputs, counted from 0"
            )
        if self.config.activation == "softmax":
            return logits.softmax(-1)[:, self.config.label]
        chosen = logits[:, self.config.label]
        return chosen.sigmoid() if self.config.activation == "sigmoid" else chosen

    def _load(self) -> tuple[Any, Any]:
        """Loads the model, once. Raises JudgeStopped on failure, then for every group."""
        if self._loaded is not None:
            return self._loaded
        if self._failure:
            raise JudgeStopped(self._failure)
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        hide_progress_bars()
        beside = self._directory / self.config.model
        name = str(beside) if beside.is_dir() else self.config.model
        try:
            if not beside.is_dir():
                find_on_hub(name, f"judge.model: {name}")
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False)
            model = model.to(pick_device(self.config.device, "judge.device")).eval()
        except (UsageError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: the GPU has too little memory
            line = " ".join(str(error).split())[:300]
            named = f"judge.model: {self.config.model} cannot be loaded: {line}"
            self._failure = str(error) if isinstance(error, UsageError) else named
            raise JudgeStopped(self._failure) from error
        tokenizer.truncation_side = "left"  # keep the end of the conversation
        tokenizer.padding_side = "right"  # padding after the rest leaves its positions as they are
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id  # the model locates each row's last token with this id
        self._loaded = model, tokenizer
        return self._loaded

    async def close(self) -> None:
        self._loaded = None


def conversation_ids(tokenizer: Any, conversation: Sequence[Json], longest: int, *, name: str) -> list[int]:
    """Returns the token ids of the conversation's end, at most `longest`. Raises JudgeError, which names the model.

    Padding tokens at the end are dropped, because a classification head reads the last token that is none.
    """
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if not (tokenizer.chat_template and controls_of(tokenizer).writes_calls):
        conversation = [_with_calls_as_text(message) for message in conversation]
    if tokenizer.chat_template:
        try:
            ids = list(controls_of(tokenizer).chat_ids(conversation))[-longest:]
        except Exception as error:  # a chat template may raise anything
            raise JudgeError(f"{name}: its chat template refuses a conversation: {describe(error)}") from error
    else:
        text = "\n\n".join(f"{message.get('role')}: {clean(message.get('content'))}" for message in conversation)
        # Let the tokenizer truncate: encoders score from the leading special token.
        ids = tokenizer(text, split_special_tokens=True, truncation=True, max_length=longest)["input_ids"]
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return list(ids) or [pad or 0]


def _with_calls_as_text(message: Json) -> Json:
    """Returns the message with each tool call as a line of its content. Example: read({"id": 5})"""
    if not (calls := message.get("tool_calls")):
        return message
    lines = [clean(message.get("content")), *map(call_text, calls)]
    return {**message, "tool_calls": None, "content": "\n".join(filter(None, lines))}


def _stem(model: Any, rows: Sequence[tuple[int, ...]]) -> tuple[int, Any]:
    """Returns the number of tokens with which all rows begin, and a decoder's keys and values for them.

    Returns (0, None) if these tokens are few, or if the model reads a token in the light of later ones.
    """
    import torch

    first, last = min(rows), max(rows)
    stem = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    stem = min(stem, *(len(row) - 1 for row in rows)) if len(rows) > 1 else 0
    if stem < MIN_STEM or not _reads_cache(model):
        return 0, None
    tokens = torch.tensor([rows[0][:stem]], device=model.device)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    return (0, None) if cache is None else (stem, cache)


def _reads_cache(model: Any) -> bool:
    return "past_key_values" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder


def _longest(wanted: int | None, model: Any, tokenizer: Any) -> int:
    """Returns the maximum input length: the smallest known limit."""
    said = (wanted, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min((number for number in said if number), default=10**9)
