"""openai itself with a tool: the loop that its documentation shows."""

import json
from importlib.metadata import version

from question import PARAMETERS, QUESTION, outcome

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]


async def rollout(policy, scenario):
    called = []
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            values = json.loads(call.function.arguments)
            called.append([call.function.name, values])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
    return outcome(called, message.content or "", openai=version("openai"))
