"""The agent: it searches a mailbox, reads e-mails and answers a question. The reward is 1 for the right answer."""

import json
from typing import Any

from inbox import Mailbox, Size, is_right, make_mailbox

from art_cli import Outcome, Policy

SYSTEM = "Find the answer in the e-mails."
MAX_TURNS = 10


def _tool(name: str, description: str, argument: str, type: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": type}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("search", "Lists e-mails that have all words of the query: number, sender, subject.", "query", "string"),
    _tool("read", "Shows the e-mail of that number.", "id", "integer"),
    _tool("answer", "Ends the search with the answer, as few words as possible.", "text", "string"),
]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    emails, question = make_mailbox(scenario["seed"], Size(**scenario["size"]))
    mailbox = Mailbox(emails)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    read: list[Any] = []
    answer: str | None = None
    turns = 0
    while turns < MAX_TURNS and answer is None:
        turns += 1
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:  # it said something to nobody
            break
        for call in message.tool_calls:
            name, value = read_call(call.function.name, call.function.arguments)
            if name == "answer":
                answer = value
            if name == "read":
                read.append(value)
            said = {"search": mailbox.search, "read": mailbox.read}[name](value) if name in ("search", "read") else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said or "nothing"})
    mailbox.close()
    right = answer is not None and is_right(answer, question.answer)
    metrics = {"answered": answer is not None, "found": question.email in read, "turns": turns}
    return Outcome(reward=float(right), metrics=metrics)


def read_call(name: str, arguments: str) -> tuple[str, Any]:
    """The tool and its one argument; ("", None) for a call that fits no tool."""
    tool = next((tool["function"] for tool in TOOLS if tool["function"]["name"] == name), None)
    if tool is None:
        return "", None
    [(argument, schema)] = tool["parameters"]["properties"].items()
    try:
        value = json.loads(arguments)[argument]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", None
    return (name, value) if type(value) is {"string": str, "integer": int}[schema["type"]] else ("", None)
