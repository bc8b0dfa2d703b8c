"""An agent of LangChain on LangGraph: a whole run with a tool, plain and then streamed."""

import asyncio
import json
import os
from importlib.metadata import version

import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

QUESTION = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent(**client: str):
    return create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"], temperature=0, max_retries=0, **client), [add])


async def main() -> None:
    done = (await agent().ainvoke(QUESTION))["messages"]
    calls = [[call["name"], call["args"]] for message in done for call in getattr(message, "tool_calls", [])]
    text = ""
    async for message, data in agent().astream(QUESTION, stream_mode="messages"):
        text += str(message.content) if data["langgraph_node"] == "model" else ""
    assert text == done[-1].content, (text, done)
    try:
        await agent(api_key="wrong").ainvoke(QUESTION)
        refused = 0
    except openai.AuthenticationError as error:
        refused = error.status_code
    print(json.dumps({"version": version("langgraph"), "calls": calls, "text": text, "refused": refused}))


asyncio.run(main())
