"""openai itself with a tool: the loop that its documentation shows. Tells which Python it ran in."""

import json
import sys
from importlib.metadata import version

from art_cli import Outcome

INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]


async def rollout(policy, scenario):
    messages = [{"role": "user", "content": scenario["question"]}]
    for _ in range(3):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            values = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
    told = {"python": sys.executable, "torch": "torch" in sys.modules, "openai": version("openai")}
    return Outcome(reward=float(scenario["answer"] in (message.content or "")), metadata=told)
