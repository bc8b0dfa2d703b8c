"""litellm: one plain turn that calls a tool, one streamed turn that answers."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network for prices
from importlib.metadata import version

import litellm

target = {"model": f"openai/{os.environ['OPENAI_MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"], "temperature": 0}
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]

first = litellm.completion(messages=messages, tools=tools, num_retries=0, **target)
calls = first.choices[0].message.tool_calls or []
messages.append(first.choices[0].message.model_dump())
for call in calls:
    values = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
stream = litellm.completion(messages=messages, tools=tools, stream=True, num_retries=0, **target)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
try:
    litellm.completion(messages=messages, api_key="wrong", num_retries=0, **target)
    refused = 0
except litellm.AuthenticationError as error:
    refused = error.status_code
called = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
print(json.dumps({"version": version("litellm"), "calls": called, "text": text, "refused": refused}))
