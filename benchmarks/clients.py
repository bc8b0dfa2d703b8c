"""Which clients hold a tool conversation with `art serve`: a table of what each got, on both engines.

    python benchmarks/clients.py                       # with .venv-vllm (make test-vllm); about 8 minutes on 2 cores
    python benchmarks/clients.py --engines embedded

The official OpenAI clients for Python and Node, litellm, LangChain's ChatOpenAI and the OpenAI Agents SDK, each as its
users use it (tests/clients/tools), the first two and the last on OpenAI's Responses too; and Anthropic's official
clients for Python and Node. The conversation is: a question, a call of a tool, the tool's answer, a streamed reply;
then a call with a wrong key. A rehearsal against a scripted server records what each client sends; `art sft` teaches a
tiny model these transcripts (tests/support/tool_clients.py); `art serve` serves that checkpoint. Each conversation is
held a second time through a gateway: `turns` were recorded, and `continued` says how many of the calls that go on from
a reply continue its tokens.

The clients get an environment of their own in .venv-clients, made at the first run.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from art_cli.chat.app import build_app  # noqa: E402
from art_cli.chat.client import HttpBackend  # noqa: E402
from art_cli.chat.replies import Chunk, Reply  # noqa: E402
from art_cli.chat.requests import Request, Sampling  # noqa: E402
from art_cli.chat.server import serve  # noqa: E402
from art_cli.rollouts.gateway import Gateway  # noqa: E402
from art_cli.trajectory import prompt, sequence  # noqa: E402
from tests.support.node import clients as install_node_client  # noqa: E402
from tests.support.real_vllm import OPTIONS  # noqa: E402
from tests.support.scripted import Engine, ScriptedBackend  # noqa: E402
from tests.support.tool_clients import ANSWER, CALL, MODEL, art_serve, converse, demo, is_right, teach  # noqa: E402

PACKAGES = (
    "openai==2.54.0",
    "anthropic==2.12.0",
    "litellm==1.106.2",
    "langchain-openai==1.7.3",
    "openai-agents==0.20.0",
)
ENVIRONMENT = ROOT / ".venv-clients"
PROGRAMS = {
    "openai (Python)": "openai_sdk.py",
    "openai (Node)": "openai_sdk.mjs",
    "litellm": "litellm_sdk.py",
    "LangChain ChatOpenAI": "langchain_sdk.py",
    "OpenAI Agents SDK": "agents_sdk.py",
    "openai, Responses (Python)": "responses_sdk.py",
    "openai, Responses (Node)": "responses_sdk.mjs",
    "Agents SDK, Responses": "agents_responses_sdk.py",
    "anthropic (Python)": "anthropic_sdk.py",
    "anthropic (Node)": "anthropic_sdk.mjs",
}
ENGINES = {"embedded": ("--engine", "embedded"), "vllm": OPTIONS}
KEY = "the-key-of-the-benchmark"

Json = dict[str, Any]


def make_environment() -> Path:
    """The Python of the clients' environment."""
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    if not done.exists() or done.read_text().split() != list(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        done.write_text("\n".join(PACKAGES))
    return python


async def rehearse(python: Path) -> list[Json]:
    """The conversation as each client sends it, as transcripts; equal ones once."""

    def answer(request: Request) -> Any:
        assert request.messages is not None
        return ANSWER if request.messages[-1]["role"] == "tool" else CALL

    backend = ScriptedBackend(answer, MODEL)
    async with serve(build_app(lambda key: backend if key == KEY else None)) as root:
        for name, program in PROGRAMS.items():
            found = await converse(program, f"{root}/v1", KEY, python=python)
            assert is_right(found), (name, found)
    definitions = {
        json.dumps(request.tools, sort_keys=True): request.tools for request in backend.requests if request.tools
    }
    return [demo(tools) for tools in definitions.values()]


class Watched(HttpBackend):
    """Counts the calls that go on from a reply: each of them has to continue the tokens that were sampled."""

    num_continued = 0

    async def reply(self, request: Request) -> Reply:
        self._count(request)
        return await super().reply(request)

    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        self._count(request)
        return super().stream(request)

    def _count(self, request: Request) -> None:
        self.num_continued += any(message["role"] == "assistant" for message in request.messages or ())


async def measure(checkpoint: Path, python: Path, options: Sequence[str]) -> dict[str, Json]:
    """What each client got from `art serve`, or from a gateway before it where that differs, and what was recorded."""
    measured = {}
    async with art_serve(checkpoint, KEY, *options) as (_, url):
        for name, program in PROGRAMS.items():
            found = await converse(program, url, KEY, python=python)
            recorded = await record(program, url, python)
            measured[name] = {**recorded, **found} if is_right(recorded) else recorded
    return measured


async def record(program: str, url: str, python: Path) -> Json:
    """What the client got through a gateway; the turns that it recorded, and how many continue an earlier one."""
    backend = Watched(url, KEY, MODEL)
    gateway = Gateway(Engine(backend, MODEL), defaults=Sampling(), seed=0, max_turns=20)
    key = gateway.open(program)
    async with gateway.serve() as base_url:
        found = await converse(program, base_url, key, python=python)
    await backend.close()
    turns = gateway.close(key).turns
    whole = [sequence(turns, index) for index in range(len(turns))]
    prompts = [prompt(turns, index) for index in range(len(turns))]
    exact = sum(any(asked[: len(before)] == before for before in whole[:index]) for index, asked in enumerate(prompts))
    return {**found, "turns": len(turns), "exact": f"{exact}/{backend.num_continued}"}


def row(client: str, engine: str, found: Json) -> str:
    if "error" in found:
        return f"{client:26s} {'?':9s} {engine:10s} NO   {found['error']}"
    calls = ", ".join(f"{name}({json.dumps(arguments)})" for name, arguments in found["calls"])
    verdict = "yes" if is_right(found) else "NO"
    got = f"{calls:22s}  {found['text']!r:16s}  {found['refused']}"
    recorded = f"{found['turns']:5d}  {found['exact']:9s}"
    return f"{client:26s} {found['version']:9s} {engine:10s} {verdict:4s} {recorded} {got}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    arguments = parser.parse_args()
    python = make_environment()
    install_node_client()
    found: dict[tuple[str, str], Json] = {}
    with tempfile.TemporaryDirectory(prefix="art-clients-") as place:
        checkpoint = teach(Path(place), asyncio.run(rehearse(python))).checkpoint_path(0)
        for engine in arguments.engines:
            results = asyncio.run(measure(checkpoint, python, ENGINES[engine]))
            found |= {(client, engine): result for client, result in results.items()}
    got = f"{'turns':5s}  {'continued':9s} {'tool call':22s}  {'streamed reply':16s}  wrong key"
    print(f"{'client':26s} {'version':9s} {'engine':10s} held {got}")
    for client in PROGRAMS:
        for engine in arguments.engines:
            print(row(client, engine, found[client, engine]))
    return 0 if all(map(is_right, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
