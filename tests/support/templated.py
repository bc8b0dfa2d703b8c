"""TemplatedBackend: a Backend whose prompts are those of a chat template, and whose answers are texts of a test.

Prompts are rendered and answers are parsed by the embedded engine's own code; only the sampling is not done. A token is
a byte, apart from the markers of ChatML and of tool calls. So a prompt that continues the tokens of the turns before it
shows that a conversation has come back as it was sampled.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.engines.embedded.messages import render
from art_cli.engines.embedded.text import Vocabulary
from tests.support.tiny import tiny_tokenizer

# As Qwen3's template writes a conversation: thoughts stay from the last question of the user on, and earlier ones go.
QWEN3 = """
{%- if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if m.reasoning_content and loop.index0 > ns.last %}
      {{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {%- if not loop.first or m.content %}{{ '\n' }}{% endif %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {%- if call.function.arguments is string %}{{ call.function.arguments }}
      {%- else %}{{ call.function.arguments | tojson }}{% endif %}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LENGTH = 10_000


class TemplatedBackend:
    """Answers a request with the text that `answer(number of the request, request)` gives."""

    def __init__(self, answer: Callable[[int, Request], str], template: str = QWEN3, model: str = "policy") -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        self.vocabulary = Vocabulary(tokenizer)
        self.requests: list[Request] = []
        self._answer, self._model = answer, model

    def models(self) -> list[str]:
        return [self._model]

    async def reply(self, request: Request) -> Reply:
        prompt = render(self.vocabulary, request, LENGTH)
        text = self._answer(len(self.requests), request)
        self.requests.append(request)
        parser = prompt.parser()
        parser.push(text)
        parser.flush()
        ids = [*self.encode(text), self.vocabulary.tokenizer.eos_token_id]
        choice = Choice(
            index=0,
            message=parser.message,
            text=text,
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            tokens=[self.vocabulary.text_of(id) for id in ids],
            finish_reason="tool_calls" if parser.calls else "stop",
        )
        return Reply(id="reply", created=1, model=request.model, choices=[choice], prompt_ids=prompt.ids, step=3)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """The same a token at a time."""
        reply = await self.reply(request)
        whole, given = reply.choices[0], reply.prompt_ids
        parser = render(self.vocabulary, request, LENGTH).parser()
        for place, id in enumerate(whole.token_ids):
            is_last = place == len(whole.token_ids) - 1
            deltas = parser.flush() if is_last else parser.push(self.vocabulary.text_of(id))
            for number, delta in enumerate(deltas or [{}]):
                ends = number == len(deltas or [{}]) - 1
                if "tool_calls" in delta:  # the ids of the whole reply
                    delta = {"tool_calls": [{**call, "id": self._id(reply, call)} for call in delta["tool_calls"]]}
                yield Chunk(
                    id=reply.id,
                    created=reply.created,
                    model=reply.model,
                    choice=Choice(
                        index=0,
                        message=delta,
                        text=delta.get("content") or "",
                        token_ids=[id] if ends else [],
                        logprobs=[-0.5] if ends else [],
                        tokens=[self.vocabulary.text_of(id)] if ends else [],
                        finish_reason=whole.finish_reason,
                    ),
                    is_last=is_last and ends,
                    prompt_ids=given if place == number == 0 else None,
                    step=reply.step,
                )
                await asyncio.sleep(0)

    def _id(self, reply: Reply, call: dict[str, object]) -> object:
        message = reply.choices[0].message or {}
        return message["tool_calls"][call["index"]]["id"]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.vocabulary.tokenizer.encode(text, add_special_tokens=False)
        return ids
