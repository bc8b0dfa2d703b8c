"""LangChain's ChatOpenAI with a bound tool: one turn that calls it, one streamed turn that answers."""

import json
import os
from importlib.metadata import version

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


llm = ChatOpenAI(model=os.environ["OPENAI_MODEL"], temperature=0, max_retries=0).bind_tools([add])
messages = [HumanMessage("What is 2 plus 3?")]
first = llm.invoke(messages)
messages.append(first)
messages += [add.invoke(call) for call in first.tool_calls]
text = "".join(str(chunk.content) for chunk in llm.stream(messages))
try:
    ChatOpenAI(model=os.environ["OPENAI_MODEL"], api_key="wrong", max_retries=0).invoke(messages[:1])
    refused = 0
except openai.AuthenticationError as error:
    refused = error.status_code
called = [[call["name"], call["args"]] for call in first.tool_calls]
print(json.dumps({"version": version("langchain-openai"), "calls": called, "text": text, "refused": refused}))
