"""TemplateBackend: a Backend that "samples" the texts that a test writes, in the tokens and template of a tokenizer.

Prompts are rendered and texts are parsed by the embedded engine's own code, so that a conversation meets a real chat
template without a model. The tokenizer has one token per byte. Logprobs are -1/8 each.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from art_cli.chat.replies import Choice, Chunk, Reply, join_deltas
from art_cli.chat.requests import Request
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt, render
from art_cli.engines.embedded.reply_text import Detokenizer, Vocabulary
from tests.support.models.tiny import CHAT_TEMPLATE, tiny_tokenizer

Json = dict[str, Any]
# The tiny template, which shows the thoughts of earlier replies too.
THINKS = CHAT_TEMPLATE.replace(
    "'<|im_start|>assistant\\n' + (message.content or '')",
    "'<|im_start|>assistant\\n' + ('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n'"
    " if message.reasoning_content else '') + (message.content or '')",
)


def scripted(*texts: str) -> Callable[[Request], str]:
    """Answers with one text after the other."""
    answers = iter(texts)
    return lambda request: next(answers)


class TemplateBackend:
    """Answers with what `answer(request)` gives; `end` is what the model writes at the end of its turn."""

    def __init__(
        self, answer: Callable[[Request], str], *, template: str = CHAT_TEMPLATE, end: str = "<|im_end|>"
    ) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        self.vocabulary = Vocabulary(tokenizer)
        self.requests: list[Request] = []
        self._answer, self._end = answer, end

    def models(self) -> list[str]:
        return ["policy"]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.vocabulary.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def read(self, prompt: Prompt, text: str) -> Json:
        """The assistant message in a whole text."""
        parser = MessageParser(prompt)
        parser.push(text)
        parser.flush()
        return parser.message

    async def reply(self, request: Request) -> Reply:
        prompt, ids, text = self._ask(request)
        message = self.read(prompt, text)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = Choice(index=0, message=message, text=text, finish_reason=reason, **_sampled(ids))
        return Reply(
            id="chatcmpl-1",
            created=1,
            model=request.model,
            choices=[choice],
            prompt_ids=prompt.ids,
            sampling=request.sampling,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        prompt, ids, _ = self._ask(request)
        parser, detokenizer = MessageParser(prompt), Detokenizer(self.vocabulary)
        for place, id in enumerate(ids):
            is_last = place == len(ids) - 1
            text = "" if is_last and id in self.vocabulary.hidden else detokenizer.push([id])
            delta = join_deltas(parser.push(text) + (parser.flush() if is_last else []))
            reason = "tool_calls" if parser.calls else "stop"
            yield Chunk(
                id="chatcmpl-1",
                created=1,
                model=request.model,
                choice=Choice(index=0, message=delta, text=text, finish_reason=reason, **_sampled([id])),
                is_last=is_last,
                prompt_ids=prompt.ids if place == 0 else None,
                sampling=request.sampling,
            )

    def _ask(self, request: Request) -> tuple[Prompt, list[int], str]:
        self.requests.append(request)
        text = self._answer(request)
        return render(self.vocabulary, request), self.encode(text + self._end), text


def _sampled(ids: list[int]) -> Json:
    return {"token_ids": ids, "logprobs": [-1 / 8] * len(ids)}
