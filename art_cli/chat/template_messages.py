"""Messages as a chat template takes them. Sampling, warm-up, judges and export all prepare a conversation here.

    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": null}
    {"role": "system",    "content": "Be brief."}

Templates read plain content and arguments that are objects. OpenAI's form has parts, nulls, and arguments as JSON text.
"""

import json

from art_cli.chat.chat_errors import invalid
from art_cli.chat.reading import check_size
from art_cli.chat.requests import Json, prompt_text
from art_cli.runtime.processes.plain_json import MAX_CHAT_DEPTH, is_deep


def keeps_text(template: str) -> bool:
    """Returns whether the template writes JSON text arguments unchanged (Qwen3, Mistral)."""
    return "arguments is string" in template or "arguments is not string" in template


def for_template(message: Json, *, keeps_text: bool = False) -> Json:
    """Returns the message with string content, arguments as objects, and without nulls or an empty list of calls.

    With `keeps_text`, JSON text arguments stay text. Raises ChatError 400 for invalid or deep JSON arguments.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    content = prompt_text(message.get("content")) or message.get("refusal") or ""
    calls = [_call_for_template(call, keeps_text) for call in message.get("tool_calls") or ()]
    message = {**message, "role": role, "content": content, "refusal": None, "tool_calls": calls or None}
    return {key: value for key, value in message.items() if value is not None}


def _call_for_template(call: Json, keeps_text: bool) -> Json:
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    try:
        if isinstance(parsed := arguments, str):
            check_size(arguments.encode(errors="replace"), "messages: a call's arguments", "messages")
            parsed = json.loads(arguments)
            if isinstance(parsed, dict | list) and is_deep(parsed, MAX_CHAT_DEPTH):
                raise ValueError("nested too deeply")
    except (ValueError, RecursionError):
        raise invalid(f"messages: arguments of a call to {function.get('name')!r} are not JSON", "messages") from None
    function["arguments"] = arguments if keeps_text else parsed
    return {**call, "function": function}
