"""Transcript: one data file row as a conversation in OpenAI's form, converted from any of these forms.

    {"messages": [...], "tools": [...]}             OpenAI's fine-tuning files; TRL stores the tools as JSON text
    {"system": "...", "messages": [...]}            Anthropic's, as on Bedrock
    {"prompt": ..., "completion": ...}              TRL; texts or message lists. Only the completion is trained
    {"conversations": [{"from", "value"}, ...]}     ShareGPT

null counts as absent. OpenAI's `weight`, `functions`, `function_call` and `refusal` are supported,
`parallel_tool_calls` affects no token, and pictures, files and sound are refused. Other row keys are ignored.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from art_cli.formats.imported_attempt import as_list, plain_message, plain_tool, with_system
from art_cli.runtime.errors import one_line
from art_cli.runtime.processes.plain_json import MAX_CHAT_DEPTH, is_deep

Json = dict[str, Any]

# https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html#sharegpt
SHAREGPT = {
    **{"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"},
    **{"model": "assistant", "chatgpt": "assistant", "function_call": "assistant", "observation": "tool"},
    **{"tool": "tool", "function_response": "tool"},
}
FORMS = '"messages", "prompt" and "completion" (TRL), or "conversations" (ShareGPT)'
PREFERENCES = ("chosen", "preferred_output")  # columns in TRL's and OpenAI's preference data


class Transcript(msgspec.Struct, kw_only=True):
    """A parsed row. `messages` and `tools` are always in OpenAI's form.

    Raises ValueError if the row is not a conversation with a reply to learn from; msgspec then reports the line.

    Example: Transcript(messages=[{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}])
    """

    messages: Any = None
    tools: Any = None
    functions: Any = None
    prompt: Any = None
    completion: Any = None
    conversations: Any = None
    system: Any = None  # a system prompt outside the conversation
    chosen: Any = None
    preferred_output: Any = None
    group_size: Any = None  # an attempt played by art has both; another tool's may have no turns
    turns: Any = None

    def __post_init__(self) -> None:
        if self.group_size is not None and self.turns:
            raise ValueError(
                "an attempt, not a transcript: the messages of good and bad attempts would be learned from alike; "
                "--best-of (sft.best_of) learns from the best scored ones of each group"
            )
        if any(getattr(self, name) is not None for name in PREFERENCES) and self.messages is None:
            raise ValueError(f"a preference, which art sft does not learn from; write the better answer as {FORMS}")
        rows = self._rows()
        self.messages = [_message(row, place) for place, row in enumerate(rows, 1)]
        functions = [{"type": "function", "function": each} for each in _list(self.functions, "functions")]
        self.tools = [plain_tool(each) for each in _list(self.tools, "tools") or functions]
        if is_deep([self.messages, self.tools], MAX_CHAT_DEPTH):
            raise ValueError(f"its messages or tools are nested more than {MAX_CHAT_DEPTH} levels deep")
        if not any(message["role"] == "assistant" for message in self.messages):
            raise ValueError("no assistant message to learn from")
        if not any(is_learned(message) for message in self.messages):
            raise ValueError("no assistant message to learn from, because each has weight 0")

    def _rows(self) -> list[Any]:
        if self.messages is not None:
            return with_system(_list(self.messages, "messages"), self.system)
        if self.completion is not None:
            shown = [_unlearned(row) for row in _as_messages(self.prompt or "", "prompt", "user")]
            return [*shown, *_as_messages(self.completion, "completion", "assistant")]
        if self.conversations is not None:
            return with_system([_sharegpt(row) for row in _list(self.conversations, "conversations")], self.system)
        raise ValueError(f"no conversation: a row needs {FORMS}; `art import` reads the logs of other tools")


def is_learned(message: Json) -> bool:
    """Returns True for an assistant message that is trained, False for weight 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _message(row: Any, place: int) -> Json:
    try:
        if isinstance(row, dict) and row.get("role") == "function":
            row = {**row, "role": "tool"}
        if isinstance(row, dict) and row.get("function_call") is not None:
            if not isinstance(row["function_call"], dict):
                raise ValueError(f"its function_call is a {type(row['function_call']).__name__}, not an object")
            row = {**row, "function_call": None, "tool_calls": [{"function": row["function_call"]}]}
        if isinstance(row, dict) and row.get("arguments") is not None:
            raise ValueError("it has arguments, which belong in its tool_calls")
        message = plain_message(row)
        if isinstance(message.get("content"), list):
            _check_parts(message["content"])
        for name in ("content", "refusal", "reasoning_content", "name"):
            if name != "content" and not isinstance(message.get(name), str | None):
                raise ValueError(f"{name!r} is a {type(message[name]).__name__}, not text")
        if message.get("audio") is not None:
            raise ValueError("it has sound, and only text is learned")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError("its weight is neither 0 (not trained) nor 1")
        for call in message.get("tool_calls") or ():
            _check_arguments(call["function"])
        return message
    except ValueError as error:
        raise ValueError(f"message {place}: {one_line(error)}") from None


def _check_parts(parts: Sequence[Json]) -> None:
    for part in parts:
        kind = part.get("type", "text")
        if kind not in ("text", "refusal"):
            raise ValueError(f"a part of type {str(kind)[:40]!r}; only text is learned")
        if not isinstance(part.get(kind), str | None):
            raise ValueError(f"a part whose {kind} is a {type(part[kind]).__name__}")


def _check_arguments(function: Json) -> None:
    name = f"the arguments of its call to {function['name'][:80]!r}"
    try:
        arguments = _decode(function["arguments"] or "{}")
    except ValueError as error:
        raise ValueError(f"{name} are not a JSON object: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{name} are not a JSON object")
    if is_deep(arguments, MAX_CHAT_DEPTH):
        raise ValueError(f"{name} are nested more than {MAX_CHAT_DEPTH} levels deep")


def _decode(text: str) -> Any:
    """Returns the value of strict JSON. Raises ValueError, also for NaN, Infinity, 1e999 and lone surrogates."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{one_line(error)} (NaN, Infinity and lone surrogates are not JSON)") from None


def _as_messages(value: Any, name: str, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) and value else _list(value or None, name)


def _unlearned(row: Any) -> Any:
    return {**row, "weight": 0} if isinstance(row, dict) and row.get("role") == "assistant" else row


def _sharegpt(row: Any) -> Any:
    """Converts one {"from", "value"} row to a message. Rows with a role are returned unchanged."""
    if not isinstance(row, dict) or row.get("role") is not None:
        return row
    sender, value = row.get("from"), row.get("value")
    if sender not in SHAREGPT:
        raise ValueError(f'conversations: "from" is {str(sender)[:40]!r}, not one of {", ".join(SHAREGPT)}')
    if sender != "function_call":
        return {"role": SHAREGPT[sender], "content": value, "weight": row.get("weight")}
    calls = _list(value if str(value).lstrip().startswith("[") else f"[{value}]", "function_call")
    return {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}


def _list(value: Any, name: str) -> list[Any]:
    """Returns a list, also parsed from JSON text (used by datasets for rows of different shapes); [] for null."""
    if isinstance(value, str):
        try:
            value = _decode(value)
        except ValueError as error:
            raise ValueError(f"{name!r} is text that is not JSON; write a list ({error})") from None
    return as_list(value, name)
