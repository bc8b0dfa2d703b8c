"""The official Python client: one plain turn that calls a tool, one streamed turn that answers."""

import json
import os

import openai

client = openai.OpenAI(max_retries=0)
model = os.environ["OPENAI_MODEL"]
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": parameters}}]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]

first = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
calls = first.choices[0].message.tool_calls or []
messages.append(first.choices[0].message)
for call in calls:
    values = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])})
stream = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
try:
    client.with_options(api_key="wrong").models.list()
    refused = 0
except openai.AuthenticationError as error:
    refused = error.status_code
called = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
print(json.dumps({"version": openai.__version__, "calls": called, "text": text, "refused": refused}))
