"""Anthropic's official Python client: one plain turn that calls a tool, one streamed turn that answers."""

import json
import os

import anthropic

client = anthropic.Anthropic(max_retries=0)
options = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 200, "extra_body": {"temperature": 0}}
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"name": "add", "description": "Add two numbers.", "input_schema": parameters}]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]

count = client.messages.count_tokens(model=options["model"], messages=messages, tools=tools).input_tokens
first = client.messages.create(messages=messages, tools=tools, **options)
assert first.usage.input_tokens == count, (first.usage, count)
calls = [block for block in first.content if block.type == "tool_use"]
results = [
    {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])} for call in calls
]
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results or "?"}]
with client.messages.stream(messages=messages, tools=tools, **options) as stream:
    text = "".join(stream.text_stream)
try:
    client.with_options(api_key="wrong").models.list()
    refused = 0
except anthropic.AuthenticationError as error:
    refused = error.status_code
called = [[call.name, call.input] for call in calls]
print(json.dumps({"version": anthropic.__version__, "calls": called, "text": text, "refused": refused}))
