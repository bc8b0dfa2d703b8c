"""Turns sampled tokens into reply choices (ChoiceWriter) and bounds their length. Needs no torch.

The embedded engine uses it for tokens sampled here, and server engines for tokens received over HTTP.
"""

from typing import NamedTuple

from art_cli.chat.chat_errors import invalid
from art_cli.chat.replies import Choice, Echo, join_deltas
from art_cli.chat.requests import Json, Request
from art_cli.engines.embedded import chat_prompts
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt
from art_cli.engines.embedded.reply_text import Detokenizer, StopWatch, Vocabulary
from art_cli.runtime.errors import EngineError

Top = list[list[tuple[int, float]]]

CONTEXT_TOKENS = 8  # number of trailing prompt tokens that can affect how the sampled tokens decode


class Piece(NamedTuple):
    """L new tokens of a generation."""

    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top: Top | None  # [L][k] token ids and logprobs, if the client asked for them
    step: int
    finish_reason: str | None = None  # None while the generation continues
    failure: EngineError | None = None


class ChoiceWriter:
    """Turns the pieces of one choice into text and message deltas."""

    def __init__(
        self, vocabulary: Vocabulary, request: Request, prompt: Prompt, index: int, echo: Echo | None = None
    ) -> None:
        self._vocabulary, self._request, self._index = vocabulary, request, index
        self._detokenizer = Detokenizer(vocabulary, context_of(prompt))
        self._stops = StopWatch(request.sampling.stop)
        self._parser = MessageParser(prompt) if request.messages is not None else None
        self._texts: list[str] = []
        self._is_first = True
        self._echo = echo  # sent with the opening piece
        self._num_unwatched = request.sampling.min_tokens  # upcoming tokens where stop strings do not count

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> Json | None:
        return self._parser.message if self._parser else None

    def write(self, piece: Piece) -> Choice:
        """Returns a chunk's choice: the new text, also as an OpenAI delta."""
        is_last = piece.finish_reason is not None
        text, ids = "", piece.ids
        if self._num_unwatched:
            unwatched, ids = ids[: self._num_unwatched], ids[self._num_unwatched :]
            self._num_unwatched -= len(unwatched)
            text = self._detokenizer.push(unwatched)
        text += self._stops.push(self._detokenizer.push(ids))
        if is_last:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self._texts.append(text)
        names = self._request.wants_logprobs
        echo, self._echo = self._echo, None
        return Choice(
            index=self._index,
            message=self._delta(text, is_last),
            text=text,
            token_ids=piece.ids,
            logprobs=piece.logprobs,
            raw_logprobs=piece.raw_logprobs,
            tokens=[self._vocabulary.text_of(id) for id in piece.ids] if names else [],
            top_logprobs=self._top(piece),
            finish_reason=self._finish_reason(piece),
            echo=echo,
            stop_string=self._stops.found if is_last else None,
        )

    def whole(self, piece: Piece) -> Choice:
        """Returns the whole choice, of which `piece` is the only piece."""
        choice = self.write(piece)
        choice.text, choice.message = self.text, self.message
        return choice

    def _delta(self, text: str, is_last: bool) -> Json | None:
        if self._parser is None:
            return None
        delta = join_deltas(self._parser.push(text) + (self._parser.flush() if is_last else []))
        if self._is_first:
            delta = {"role": "assistant", **delta}
        self._is_first = False
        return delta

    def _top(self, piece: Piece) -> list[list[tuple[str, float]]] | None:
        if piece.top is None:
            return None
        return [[(self._vocabulary.text_of(id), value) for id, value in likeliest] for likeliest in piece.top]

    def _finish_reason(self, piece: Piece) -> str:
        reason = piece.finish_reason or "stop"
        return "tool_calls" if reason == "stop" and self._parser is not None and self._parser.calls else reason


def echo_of(vocabulary: Vocabulary, request: Request, ids: list[int], logprobs: list[float], top: Top) -> Echo:
    """Returns the prompt for `echo`. When logprobs are requested, `logprobs` and `top` start at the second token.

    A token holding part of a character gets the character's offset.
    """
    detokenizer, texts, offsets, length = Detokenizer(vocabulary), [], [], 0
    for id in ids:
        offsets.append(length)
        texts.append(detokenizer.push([id]))
        length += len(texts[-1])
    text = "".join([*texts, detokenizer.flush()]) if isinstance(request.prompt, list) else request.prompt or ""
    if not request.wants_logprobs:
        return Echo(text=text)
    named = [[(vocabulary.text_of(id), value) for id, value in likeliest] for likeliest in top]
    return Echo(
        text=text,
        tokens=[vocabulary.text_of(id) for id in ids],
        offsets=offsets,
        logprobs=[None, *logprobs],
        top_logprobs=[None, *named] if request.top_logprobs else None,
    )


def context_of(prompt: Prompt) -> list[int]:
    """Returns the trailing prompt tokens that can affect how the sampled tokens decode."""
    return prompt.ids[-CONTEXT_TOKENS:]


def reply_limit(request: Request, prompt: Prompt, most: int, vocabulary: int) -> int:
    """Returns the total length in tokens, prompt included, at which a generation ends.

    `most` is the context length, `vocabulary` the number of token ids. Raises ChatError 400 if the prompt exceeds the
    context or has an unknown token.
    """
    num_prompt = len(prompt.ids)
    if num_prompt == 0:
        raise invalid("prompt: it has no tokens", "prompt")
    asked = request.sampling.max_tokens
    if num_prompt + chat_prompts.num_wanted(request) > most:
        raise chat_prompts.too_long(request, num_prompt, most)
    for id in (min(prompt.ids), max(prompt.ids)):
        if not 0 <= id < vocabulary:
            raise invalid(f"prompt: the model has no token {id}", "prompt")
    for id, _ in request.sampling.logit_bias:
        if id >= vocabulary:
            raise invalid(f"logit_bias: the model has no token {id}", "logit_bias")
    return most if asked is None else min(most, num_prompt + asked)
