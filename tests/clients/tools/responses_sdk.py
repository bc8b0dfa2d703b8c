"""The official Python client on the Responses: a turn that calls a tool, a streamed turn that answers, a schema."""

import json
import os

import openai
from pydantic import BaseModel

client = openai.OpenAI(max_retries=0)
model = os.environ["OPENAI_MODEL"]
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "name": "add", "description": "Add two numbers.", "parameters": parameters}]
conversation = [{"role": "user", "content": "What is 2 plus 3?"}]


class Sum(BaseModel):
    value: int


first = client.responses.create(model=model, input=conversation, tools=tools, temperature=0)
calls = [item for item in first.output if item.type == "function_call"]
conversation += first.output
outputs = []
for call in calls:
    values = json.loads(call.arguments)
    outputs.append({"type": "function_call_output", "call_id": call.call_id, "output": str(values["a"] + values["b"])})
conversation += outputs
with client.responses.stream(model=model, input=conversation, tools=tools, temperature=0) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == text
again = client.responses.create(model=model, input=outputs, tools=tools, temperature=0, previous_response_id=first.id)
assert again.output_text == text, (again.output_text, text)
parsed = client.responses.parse(model=model, input="A sum.", text_format=Sum, max_output_tokens=200, temperature=0)
assert parsed.output_parsed is None or isinstance(parsed.output_parsed, Sum), parsed
try:
    client.with_options(api_key="wrong").responses.create(model=model, input="hi")
    refused = 0
except openai.AuthenticationError as error:
    refused = error.status_code
called = [[call.name, json.loads(call.arguments)] for call in calls]
print(json.dumps({"version": openai.__version__, "calls": called, "text": text, "refused": refused}))
