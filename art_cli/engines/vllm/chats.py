"""Chats: sends conversations to vLLM as tokens when the server would render or parse them differently.

    our template and tokens -> /v1/completions -> the sampled tokens -> our parser -> a message

vLLM renders messages itself and tokenizes markers inside text as control tokens. It leaves thoughts in the reply's
text, and only parses calls in Hermes syntax. All other conversations are passed through. Forced calls are constrained
by the tools' schemas as in vLLM's own chat API: the reply is JSON, either the arguments (a named tool) or a list of
calls (`required`).
"""

import contextlib
import logging
from dataclasses import replace

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.control_tokens import Guard
from art_cli.chat.reading import RequestReader
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Json, Request
from art_cli.chat.template_messages import for_template
from art_cli.engines.embedded import chat_prompts
from art_cli.engines.embedded.call_syntax import (
    HERMES,
    MISTRAL,
    call_of,
    find_syntax,
    mistral_id,
    read_json_calls,
    schemas_of,
)
from art_cli.engines.embedded.chat_prompts import CALL, THINK_END, Prompt
from art_cli.engines.embedded.choices import ChoiceWriter, Piece, reply_limit
from art_cli.engines.embedded.reply_text import Vocabulary
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.tokenizer import configs_of, eos_ids, load_tokenizer, stop_ids
from art_cli.runtime.errors import one_line
from art_cli.runtime.threads import call_in_thread

log = logging.getLogger(__name__)


class Chats:
    """Renders conversations for one policy's servers. Before `start` all conversations are passed through."""

    def __init__(self, model: PolicySpec, *, has_parsers: bool = False) -> None:
        """`has_parsers`: the user has configured the server's parsers, or runs the server."""
        self._model, self._has_parsers = model, has_parsers
        self._vocabulary: Vocabulary | None = None
        self._ends: tuple[int, ...] = ()  # stop tokens from our template that the server does not know
        self._reader = RequestReader()

    async def start(self) -> None:
        """Loads the tokenizer, once."""
        if self._vocabulary is not None:
            return
        try:
            tokenizer = await call_in_thread(load_tokenizer, self._model.base)
        except ValueError as error:
            log.warning("vllm: the server renders every text itself, markers in it too: %s", one_line(error))
            return
        if self._model.chat_template is not None:
            tokenizer.chat_template = self._model.chat_template
        configs = []
        with contextlib.suppress(OSError, ValueError):  # a server that does not know the model cannot start anyway
            configs = await call_in_thread(configs_of, self._model.base)
        self._ends = tuple(set(stop_ids(tokenizer, *configs)) - eos_ids(tokenizer, *configs))
        self._vocabulary = Vocabulary(tokenizer)

    def ended(self, request: Request) -> Request:
        """Returns the request with end-of-turn tokens that the server does not know."""
        if not self._ends or request.messages is None:
            return request
        sampling = msgspec.structs.replace(request.sampling, stop_ids=(*request.sampling.stop_ids, *self._ends))
        return msgspec.structs.replace(request, sampling=sampling)

    async def rendered(self, request: Request) -> "RenderedChat | None":
        """Returns the conversation as tokens; None if the server renders it the same way. Raises like `render`."""
        vocabulary, talk = self._vocabulary, request.messages
        if vocabulary is None or talk is None:
            return None
        is_read_here = self._is_read_here(vocabulary, request)
        if not is_read_here and not _has_marker(vocabulary, request, talk):
            return None
        prompt = await self._render(vocabulary, request)
        if not is_read_here and not prompt.is_guarded:
            return None
        return RenderedChat(vocabulary, request, prompt, self._left(request, prompt))

    def _is_read_here(self, vocabulary: Vocabulary, request: Request) -> bool:
        """Returns True if the server would miss thoughts or calls in the reply that we can parse."""
        template = vocabulary.tokenizer.chat_template or ""
        knows_calls = find_syntax(template) != HERMES
        if self._has_parsers or (request.tools and not knows_calls and CALL not in template):
            return False
        return THINK_END in template or (bool(request.tools) and knows_calls)

    async def bounded(self, request: Request) -> Request | None:
        """Returns an overlong request with a reply that fits the context; None if the client insists on its length.

        Raises ChatError if the prompt alone is too long.
        """
        asked = request.sampling.max_tokens
        if self._vocabulary is None or asked is None or chat_prompts.num_wanted(request) == asked:
            return None
        most = self._left(request, await self._render(self._vocabulary, request))
        sampling = msgspec.structs.replace(request.sampling, max_tokens=most)
        return msgspec.structs.replace(request, sampling=sampling) if most < asked else None

    async def _render(self, vocabulary: Vocabulary, request: Request) -> Prompt:
        free = msgspec.structs.replace(request, response_format=None)
        if request.tool_choice != "none":
            free = msgspec.structs.replace(free, tool_choice="auto")
        return await self._reader.read(chat_prompts.render, vocabulary, free, self._model.max_length)

    def _left(self, request: Request, prompt: Prompt) -> int:
        """Returns how many tokens the reply may have."""
        return reply_limit(request, prompt, self._model.max_length, self._model.vocabulary) - len(prompt.ids)


def _has_marker(vocabulary: Vocabulary, request: Request, messages: list[Json]) -> bool:
    """Returns True if any text in the conversation may contain a marker."""
    talk = [for_template(message) for message in messages]
    guard = Guard(vocabulary.controls, talk, request.tools, request.template_kwargs)
    guard.messages(talk)
    guard.value([request.tools, request.template_kwargs])
    return bool(guard.letters)


class RenderedChat:
    """A conversation as a token prompt, and the conversion of sampled tokens back to messages."""

    def __init__(self, vocabulary: Vocabulary, request: Request, prompt: Prompt, max_tokens: int) -> None:
        """`max_tokens` bounds the reply, because completions and chats have different defaults."""
        self.request = msgspec.structs.replace(
            request,
            messages=None,
            tools=[],
            prompt=prompt.ids,
            response_format=_held_to(request),
            sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens),
        )
        if self.request.response_format is not None:  # the format applies from the very beginning of the reply
            prompt = replace(prompt, opening="", has_tools=False, has_thinking=False)
        self._syntax = prompt.syntax
        self._writers = [ChoiceWriter(vocabulary, request, prompt, index) for index in range(request.sampling.n)]
        self._choice = request.tool_choice if request.tools else "auto"

    def reply(self, reply: Reply) -> Reply:
        for choice in reply.choices:
            self._write(choice, is_last=True)
            choice.message = self._message(choice) or self._writers[choice.index].message
        return msgspec.structs.replace(reply, id=_chat_id(reply.id))

    def chunk(self, chunk: Chunk) -> Chunk:
        if chunk.choice.token_ids or chunk.is_last:
            delta = self._write(chunk.choice, is_last=chunk.is_last)
            if self._choice not in ("auto", "none"):  # the calls are known at the end
                delta = (self._message(chunk.choice) or {}) if chunk.is_last else {}
                for index, call in enumerate(delta.get("tool_calls", ())):
                    call["index"] = index
            chunk.choice.message = delta
        return msgspec.structs.replace(chunk, id=_chat_id(chunk.id))

    def _write(self, choice: Choice, *, is_last: bool) -> Json | None:
        """Sets text and finish reason of the choice. Returns the new part as a delta."""
        raw = choice.raw_logprobs or choice.logprobs
        reason = choice.finish_reason if is_last else None
        written = self._writers[choice.index].write(Piece(choice.token_ids, choice.logprobs, raw, None, 0, reason))
        choice.text, choice.finish_reason = written.text, written.finish_reason
        choice.tokens = written.tokens or choice.tokens  # the server's tokens have no bytes for partial characters
        if choice.top_logprobs is not None:
            most = self.request.top_logprobs  # the server adds the sampled token
            choice.top_logprobs = [sorted(top, key=lambda each: -each[1])[:most] for top in choice.top_logprobs]
        choice.stop_string = choice.stop_string or written.stop_string
        return written.message

    def _message(self, choice: Choice) -> Json | None:
        """Returns the message of a forced call; None when no call was forced."""
        if self._choice in ("auto", "none"):
            return None
        text = self._writers[choice.index].text
        calls = _calls(text, self._choice)
        if self._syntax == MISTRAL:  # its templates accept only such ids
            calls = [{**call, "id": mistral_id(None)} for call in calls]
        if not calls:
            return {"role": "assistant", "content": text}
        choice.finish_reason = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        return {"role": "assistant", "content": None, "tool_calls": calls}


def _calls(text: str, choice: str | Json) -> list[Json]:
    """Returns the forced calls in a reply. If truncated, a named call has partial arguments, and a list is empty."""
    if isinstance(choice, dict):
        return [call_of(choice["function"]["name"], text)]
    return read_json_calls(text, {}) or []


def _held_to(request: Request) -> Json | None:
    """Returns the response_format that enforces a forced call, by default the request's own."""
    schemas = schemas_of(request.tools)
    if not schemas or request.tool_choice in ("auto", "none"):
        return request.response_format
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        if name not in schemas:
            raise ChatError(400, f"tool_choice: unknown tool {name!r}", param="tool_choice")
        schema: Json = {"type": "object", **schemas[name]}
    else:
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"type": "object", **parameters}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, parameters in schemas.items()
        ]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return {"type": "json_schema", "json_schema": {"name": "calls", "schema": schema}}


def _chat_id(id: str) -> str:
    return f"chat{id}" if id.startswith("cmpl-") else id
