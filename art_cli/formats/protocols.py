"""One call as its request and response in OpenAI's chat protocol, OpenAI's Responses or Anthropic's Messages.

The reply is read as a client sends it back: its output items or content blocks follow those of the request, and the
wires of `chat` make messages of them all.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Sampling
from art_cli.chat.wires.anthropic_messages import AnthropicCountTokens
from art_cli.chat.wires.responses_items import Item, conversation, messages_of, name_kinds
from art_cli.formats.imported_attempt import Tokens, TracedCall, as_list, plain_message, plain_tool, sampling_of
from art_cli.runs.trajectory import Json

MESSAGES_FIELDS = ("model", "system")  # taken as they are; messages and tools are looked at
Kept = Mapping[str, Sequence[Json]]  # id of a response -> its conversation, the reply included


def call_of(request: Json, response: Json, kept: Kept) -> TracedCall:
    """Returns the call. `kept` are earlier responses, which a Responses request may go on from by their id alone.

    Raises ValueError if the call failed, or the log has it in another form.
    """
    if error := response.get("error"):
        raise ValueError(f"a call that failed: {json.dumps(error)[:200]}")
    try:
        if isinstance(response.get("choices"), list):
            return _chat_call(request, response)
        if isinstance(response.get("output"), list):
            return _responses_call(request, response, kept)
        if response.get("type") == "message":
            return _messages_call(request, response)
    except (ChatError, msgspec.ValidationError) as error:
        raise ValueError(error.message if isinstance(error, ChatError) else str(error)) from error
    raise ValueError("a response without choices (chat), output (Responses) or content (Messages)")


def _chat_call(request: Json, response: Json) -> TracedCall:
    messages = as_list(request.get("messages"), "messages")
    if not messages:
        raise ValueError("a request without messages")
    if not response["choices"] or not isinstance(choice := response["choices"][0], dict):
        raise ValueError("a response without choices")
    return TracedCall(
        messages=[plain_message(each) for each in messages],
        message=plain_message(choice.get("message")),
        tools=as_list(request.get("tools"), "tools"),
        tokens=_tokens(response, choice),
        sampling=sampling_of(request),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


def _tokens(response: Json, choice: Json) -> Tokens | None:
    """Returns the tokens of a reply of vLLM with `return_token_ids` and `logprobs`; None where it lacks one of them."""
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(prompt, list) or not isinstance(sampled, list) or not isinstance(content, list):
        return None
    return Tokens(prompt, sampled, [each.get("logprob") if isinstance(each, dict) else None for each in content])


def _responses_call(request: Json, response: Json, kept: Kept) -> TracedCall:
    asked = request.get("input")
    items = (
        [{"type": "message", "role": "user", "content": asked}] if isinstance(asked, str) else as_list(asked, "input")
    )
    before = request.get("previous_response_id")
    if before is not None and before not in kept:
        raise ValueError(f"it goes on from a response that is not in the log: {str(before)[:80]!r}")
    whole = json.loads(json.dumps([*items, *response["output"]]))  # a copy, because types are written into it
    name_kinds(whole)
    said = messages_of(msgspec.convert(whole, list[Item]))
    if not said or said[-1]["role"] != "assistant":
        raise ValueError("a response without a message or a call")
    earlier = [] if before is None else kept[before]
    instructions = request.get("instructions")
    if not isinstance(instructions, str | None):
        raise ValueError("'instructions' is no text")
    messages = conversation(instructions, [*earlier, *said])
    functions = [tool for tool in as_list(request.get("tools"), "tools") if _is_function(tool)]
    return TracedCall(
        messages=messages[:-1],
        message=messages[-1],
        tools=[plain_tool(each) for each in functions],
        sampling=sampling_of(request),
    )


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type", "function") == "function"


def _is_own(tool: Any) -> bool:
    """Returns whether the client runs the tool, and not Anthropic."""
    return isinstance(tool, dict) and tool.get("type", "custom") == "custom"


def _messages_call(request: Json, response: Json) -> TracedCall:
    reply = {"role": "assistant", "content": response.get("content")}
    body = {key: request[key] for key in MESSAGES_FIELDS if request.get(key) is not None}
    body["tools"] = [tool for tool in as_list(request.get("tools"), "tools") if _is_own(tool)]
    body["messages"] = [*as_list(request.get("messages"), "messages"), reply]
    body.setdefault("model", "unknown")
    parsed = AnthropicCountTokens().parse(
        msgspec.json.encode(body), Sampling()
    )  # this wire takes a reply as the last message
    messages = parsed.messages or []
    return TracedCall(
        messages=messages[:-1],
        message=messages[-1],
        tools=parsed.tools,
        sampling=sampling_of(request),
        finish_reason="length" if response.get("stop_reason") == "max_tokens" else "stop",
    )
