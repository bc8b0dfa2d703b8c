"""What the model is shown before it plays: the talks of a clerk who mostly guesses.

Each call has the last number that was mentioned. Two decisions of three are drawn at random: which of the tools that
take such a number is called, or whether the last result is the answer already. One of three is what the question needs.
Half of the talks end with the right answer, and the model learns the rest from playing.
"""

import json
import random
from typing import Any

from desk import TOOLS, Desk, kind
from scenarios import train
from server import listed

NUM_DEMOS = 4000
KNOWN = 1 / 3  # share of the decisions that are what the question needs
FUNCTIONS = [
    {
        "type": "function",
        "function": {**{key: tool[key] for key in ("name", "description")}, "parameters": tool["inputSchema"]},
    }
    for tool in listed()
]


def talks() -> list[dict[str, Any]]:
    draw, desk, tasks = random.Random(0), Desk(), train()
    chosen = draw.choices(tasks, k=NUM_DEMOS)
    return [{"messages": _talk(draw, desk, each["task"], tuple(each["calls"])), "tools": FUNCTIONS} for each in chosen]


def _talk(draw: random.Random, desk: Desk, task: str, tools: tuple[str, ...]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    said = "".join(filter(str.isdigit, task))
    for place in range(4):
        possible = [name for name, (key, _, _) in TOOLS.items() if said.isdigit() and key == kind(int(said))]
        needed = tools[place] if place < len(tools) and tools[place] in possible else None
        tool = needed if draw.random() < KNOWN else draw.choice([*possible, *([None] if place else [])])
        if tool is None:
            break
        number, said = said, desk.call(tool, int(said))
        function = {"name": tool, "arguments": json.dumps({TOOLS[tool][0]: int(number)})}
        call = {"id": f"call-{place}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call-{place}", "content": said})
    return [*messages, {"role": "assistant", "content": said}]
