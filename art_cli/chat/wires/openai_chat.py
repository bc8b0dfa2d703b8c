"""OpenAIChat: OpenAI's chat completions as a wire. Requests have messages, tools and response formats.

https://platform.openai.com/docs/api-reference/chat
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from art_cli.chat.chat_errors import invalid
from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.chat.wires import openai_shared

_Text = Annotated[str, Meta(min_length=1)]


class _Part(msgspec.Struct):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Json | None = None  # OpenAI's form before tools


class _Function(msgspec.Struct):
    name: _Text
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"]


class _SchemaFormat(msgspec.Struct, tag="json_schema"):
    json_schema: openai_shared.NamedSchema


class ChatBody(openai_shared.Body, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: openai_shared.Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Tool | None = None
    response_format: openai_shared.PlainFormat | openai_shared.ObjectFormat | _SchemaFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: Json | None = None  # vLLM's parameter


class OpenAIChat(openai_shared.OpenAI):
    path = "/v1/chat/completions"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        fields, chat = openai_shared.parse_body(body, ChatBody)
        if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one", "max_tokens")
        if any(message.function_call for message in chat.messages):
            raise invalid("messages: function_call is not supported; send tool_calls", "messages")
        if chat.top_logprobs and not chat.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        sampling = openai_shared.sampling_of(chat, chat.max_completion_tokens or chat.max_tokens)
        return Request(
            model=chat.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            messages=fields["messages"],
            tools=fields.get("tools") or [],
            tool_choice=_tool_choice(chat),
            calls_in_parallel=fields.get("parallel_tool_calls") is not False,
            response_format=None
            if isinstance(chat.response_format, openai_shared.PlainFormat)
            else fields.get("response_format"),
            template_kwargs=openai_shared.template_kwargs(chat.chat_template_kwargs or {}),
            is_stream=bool(chat.stream),
            **openai_shared.wanted_usage(chat),
            wants_logprobs=bool(chat.logprobs),
            top_logprobs=chat.top_logprobs or 0,
            wants_token_ids=bool(chat.return_token_ids),
            user_set=frozenset(sampling),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        choices = [
            {
                "index": choice.index,
                "message": choice.message or {"role": "assistant", "content": choice.text},
                "logprobs": _logprobs(request, choice) if request.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
                **openai_shared.token_fields(request, choice),
            }
            for choice in reply.choices
        ]
        ids = {"prompt_token_ids": reply.prompt_ids} if request.wants_token_ids else {}
        return self._body("chat.completion", request, reply, choices, **ids)

    def stream(self, request: Request) -> "_ChatEvents":
        return _ChatEvents(self, request)


# --- the request ------------------------------------------------------------------------------------------------------


def _tool_choice(chat: ChatBody) -> str | Json:
    names, choice = {tool.function.name for tool in chat.tools or []}, chat.tool_choice
    if isinstance(choice, _Tool):
        return openai_shared.tool_choice_of(None, choice.function.name, names)
    return openai_shared.tool_choice_of(choice, None, names)


# --- the reply --------------------------------------------------------------------------------------------------------


def _logprobs(request: Request, choice: Choice) -> Json:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`"""
    return {"content": openai_shared.token_logprobs(request, choice), "refusal": None}


class _ChatEvents(openai_shared.OpenAIEvents):
    kind = "chat.completion.chunk"

    def first_content(self, choice: Choice) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def content(self, choice: Choice) -> Json:
        delta: Json = {"content": choice.text} if choice.message is None else choice.message
        delta = {name: value for name, value in delta.items() if name != "role" and value}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        return {"delta": delta}

    def logprobs(self, choice: Choice) -> Json:
        return _logprobs(self._request, choice)
