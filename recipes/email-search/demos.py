"""What the model is shown before it trains: legal calls, mostly at random.

Each searches for a name of the question, reads an e-mail that was found, and answers with a fact in it. A third of the
demos read the right e-mail and answer what was asked; the others read any, and answer with any fact.
"""

import json
import random
from typing import Any

from inbox import Mailbox, make_mailbox
from rollout import SYSTEM, TOOLS
from scenarios import SMALL

NUM_DEMOS = 4000
SHARE_RIGHT = 1 / 3


def searches() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [make_demo(f"demo-{number}", draw) for number in range(NUM_DEMOS)]


def make_demo(seed: str, draw: random.Random) -> dict[str, Any]:
    emails, question = make_mailbox(seed, SMALL)
    mailbox = Mailbox(emails)
    asked = emails[question.email - 1]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    hits = mailbox.search(_call(messages, "search", query=draw.choice([asked.sender, asked.project])))
    messages.append({"role": "tool", "tool_call_id": "0", "content": hits})
    is_right = draw.random() < SHARE_RIGHT
    number = question.email if is_right else int(draw.choice(hits.splitlines()).split()[0])
    read = _call(messages, "read", id=number)
    messages.append({"role": "tool", "tool_call_id": "1", "content": mailbox.read(read)})
    answer = question.answer if is_right else draw.choice(list(emails[read - 1].facts.values()))
    _call(messages, "answer", text=answer)
    mailbox.close()
    return {"messages": messages, "tools": TOOLS}


def _call(messages: list[dict[str, Any]], name: str, **arguments: Any) -> Any:
    """Adds the call to the messages; its argument."""
    call = {"id": str(len(messages) // 2 - 1), "type": "function"}
    function = {"name": name, "arguments": json.dumps(arguments)}
    messages.append({"role": "assistant", "tool_calls": [call | {"function": function}]})
    [value] = arguments.values()
    return value
