"""Which clients hold a tool conversation with `art serve`: a table of what each got, on both engines.

    python -m benchmarks.others.clients   # with .venv-vllm (make test-vllm); about 12 minutes on 2 cores
    python -m benchmarks.others.clients --engines embedded
    python -m benchmarks.others.clients --engines vllm --only AutoGen

The official clients of OpenAI and Anthropic for Python and Node, litellm, LangChain, LangGraph, pydantic-ai, AutoGen,
the OpenAI Agents SDK and the Vercel AI SDK, each as its users use it (tests/clients/tools), on each protocol that it
speaks. The conversation is: a question, a call of a tool, the tool's answer, a streamed reply;
then a call with a wrong key. A rehearsal against a scripted server records what each client sends; `art sft` teaches a
tiny model these transcripts (tests/support/models/tool_clients.py); `art serve` serves that checkpoint. Each
conversation is held a second time through a gateway: `turns` were recorded, and `continued` says how many of the calls
that go on from a reply continue its tokens. Under the table stands what OpenEnv's own check of an endpoint says of each
engine.

The clients have an environment of their own (`make setup-agents`), all but litellm, which does not go with openai 3.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from art_cli.chat.chat_app import build_app
from art_cli.chat.client import HttpBackend
from art_cli.chat.http_server import serve
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, Sampling, text_of
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import prompt, sequence
from benchmarks.shared.paths import ROOT
from tests.support.models.tool_clients import ANSWER, CALL, MODEL, converse, is_right, teach
from tests.support.others.node import clients as install_node_client
from tests.support.others.real_agents import PYTHON
from tests.support.others.real_vllm import OPTIONS
from tests.support.servers.serving import art_serve
from tests.support.standins.scripted import Engine, ScriptedBackend

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
PROGRAMS = {  # client, protocol -> its program
    ("openai (Python)", CHAT): "openai_sdk.py",
    ("openai (Node)", CHAT): "openai_sdk.mjs",
    ("litellm", CHAT): "litellm_sdk.py",
    ("LangChain ChatOpenAI", CHAT): "langchain_sdk.py",
    ("LangGraph", CHAT): "langgraph_agent.py",
    ("pydantic-ai", CHAT): "pydantic_sdk.py",
    ("AutoGen", CHAT): "autogen_sdk.py",
    ("OpenAI Agents SDK", CHAT): "agents_sdk.py",
    ("Vercel AI SDK (Node)", CHAT): "vercel_sdk.mjs chat",
    ("openai (Python)", RESPONSES): "responses_sdk.py",
    ("openai (Node)", RESPONSES): "responses_sdk.mjs",
    ("OpenAI Agents SDK", RESPONSES): "agents_responses_sdk.py",
    ("Vercel AI SDK (Node)", RESPONSES): "vercel_sdk.mjs",
    ("anthropic (Python)", MESSAGES): "anthropic_sdk.py",
    ("anthropic (Node)", MESSAGES): "anthropic_sdk.mjs",
}
ENGINES = {"embedded": ("--engine", "embedded"), "vllm": OPTIONS}
KEY = "the-key-of-the-benchmark"
CHECK_S = 300.0  # longest wait for OpenEnv's check

Json = dict[str, Any]
Client = tuple[str, str]  # its name and its protocol


def python_of(program: str) -> Path:
    """The Python that has the program's packages: litellm is art's own, because it does not go with openai 3."""
    return Path(sys.executable) if program.startswith("litellm") else PYTHON


async def rehearse() -> list[Json]:
    """The conversation as each client sends it, as transcripts; equal ones once."""

    def answer(request: Request) -> Any:
        assert request.messages is not None
        return ANSWER if request.messages[-1]["role"] == "tool" else CALL

    backend = ScriptedBackend(answer, MODEL)
    async with serve(build_app(lambda key: backend if key == KEY else None)) as root:
        for name, program in PROGRAMS.items():
            found = await converse(program, f"{root}/v1", KEY, python=python_of(program))
            assert is_right(found), (name, found)
    whole = [
        transcript(request) for request in backend.requests if (request.messages or [{}])[-1].get("role") == "tool"
    ]
    return list({json.dumps(each, sort_keys=True): each for each in whole}.values())


def transcript(request: Request) -> Json:
    """The conversation that a client's last request holds, with its answer, as `art sft` reads it."""
    messages: list[Json] = []
    for sent in request.messages or []:
        message = {"role": sent["role"], "content": text_of(sent.get("content"))}
        if sent.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": "call-add"} for call in sent["tool_calls"]]
        if sent["role"] == "tool":
            message["tool_call_id"] = "call-add"
        messages.append(message)
    return {"messages": [*messages, {"role": "assistant", "content": ANSWER}], "tools": request.tools}


class Watched(HttpBackend):
    """Counts the calls that go on from a reply: each of them has to continue the tokens that were sampled."""

    num_continued = 0

    async def reply(self, request: Request) -> Reply:
        self._count(request)
        return await super().reply(request)

    def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        self._count(request)
        return super().stream(request)

    def _count(self, request: Request) -> None:
        self.num_continued += any(message["role"] == "assistant" for message in request.messages or ())


async def measure(
    checkpoint: Path, options: Sequence[str], clients: Sequence[Client]
) -> tuple[dict[Client, Json], Json]:
    """What each client got from `art serve`, or from a gateway before it where that differs, and what was recorded; and
    the report of OpenEnv's check."""
    measured = {}
    async with art_serve(f"{MODEL}={checkpoint}", *options, key=KEY) as (_, url):
        report = await grade(url)
        for name in clients:
            program = PROGRAMS[name]
            found = await converse(program, url, KEY, python=python_of(program))
            recorded = await record(program, url)
            measured[name] = {**recorded, **found} if is_right(recorded) else recorded
    return measured, report


async def grade(url: str) -> Json:
    """What `validate_llm` of OpenEnv says of the endpoint: which of an agent's calls could be captured there."""
    command = (str(PYTHON), str(ROOT / "tests" / "clients" / "tools" / "openenv_validate.py"), url, MODEL, KEY)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), CHECK_S)
    report: Json = json.loads(out)
    return report


async def record(program: str, url: str) -> Json:
    """What the client got through a gateway; the turns that it recorded, and how many continue an earlier one."""
    backend = Watched(url, KEY, MODEL)
    gateway = Gateway(Engine(backend, MODEL), defaults=Sampling(), seed=0, max_turns=20)
    key = gateway.open(program)
    async with gateway.serve() as base_url:
        found = await converse(program, base_url, key, python=python_of(program))
    await backend.close()
    turns = gateway.close(key).turns
    whole = [sequence(turns, index) for index in range(len(turns))]
    prompts = [prompt(turns, index) for index in range(len(turns))]
    exact = sum(any(asked[: len(before)] == before for before in whole[:index]) for index, asked in enumerate(prompts))
    return {**found, "turns": len(turns), "exact": f"{exact}/{backend.num_continued}"}


def row(client: Client, engine: str, found: Json) -> str:
    start = f"| {client[0]} | {client[1]} | {found.get('version', '?')} | {engine} "
    if "error" in found:
        return f"{start}| no | {found['error']} |"
    calls = ", ".join(f"{name}({json.dumps(arguments)})" for name, arguments in found["calls"])
    recorded = f"{found['turns']} | {found['exact']}"
    return (
        f"{start}| {'yes' if is_right(found) else 'NO'} | {recorded} | {calls} | {found['text']} | {found['refused']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--only", nargs="+", metavar="CLIENT", default=[name for name, _ in PROGRAMS], help="by name")
    arguments = parser.parse_args()
    clients = [client for client in PROGRAMS if client[0] in arguments.only]
    install_node_client()
    found: dict[tuple[Client, str], Json] = {}
    reports: dict[str, Json] = {}
    with tempfile.TemporaryDirectory(prefix="art-clients-") as place:
        checkpoint = teach(Path(place), asyncio.run(rehearse())).checkpoint_path(0)
        for engine in arguments.engines:
            results, reports[engine] = asyncio.run(measure(checkpoint, ENGINES[engine], clients))
            found |= {(client, engine): result for client, result in results.items()}
    print(
        "| client | protocol | version | engine | held | turns | continued | tool call | streamed reply | wrong key |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for client in clients:
        for engine in arguments.engines:
            print(row(client, engine, found[client, engine]))
    for engine, report in reports.items():
        print(f"OpenEnv's check of {engine}: {report['capture_level']}, logprobs {report['logprobs_mode']}")
    is_graded = all(report["capture_level"] == "tokens" for report in reports.values())
    return 0 if is_graded and all(map(is_right, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
