"""Clients as their users use them hold a tool conversation with `art serve` on the embedded engine.

`benchmarks/others/clients.py` has more of them, and vLLM; tests/serving/test_vllm_serve.py has two of these on vLLM.
"""

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.models.tool_clients import MODEL, PLACE, TOOLS, converse, demo, is_right, teach
from tests.support.others.node import clients as install_node_client
from tests.support.others.real_agents import PYTHON, has
from tests.support.servers.serving import art_serve

KEY = "the-key-of-this-test"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `art serve` is told to serve."""
    return f"{MODEL}={teach(tmp_path_factory.mktemp('taught'), [demo(TOOLS)]).root}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(served: str) -> AsyncIterator[str]:
    async with art_serve(served, "--engine", "embedded", key=KEY) as (_, url):
        yield url


PROGRAMS = ["openai_sdk.py", "responses_sdk.py", "anthropic_sdk.py", "litellm_sdk.py"]
PROGRAMS += ["openai_sdk.mjs", "responses_sdk.mjs", "anthropic_sdk.mjs"]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_client_gets_the_call_then_the_streamed_answer_and_401_with_another_key(url: str, program: str) -> None:
    if program.endswith(".mjs"):
        install_node_client()
    found = await converse(program, url, KEY)
    assert is_right(found), found


@pytest.mark.agents
@pytest.mark.skipif(not has("openenv"), reason="no openenv in .venv-agents: make test-agents")
async def test_openenv_finds_that_what_is_served_can_be_trained_on(served: str) -> None:
    """It asks for token ids and logprobs, and whether these change with the temperature as those sampled from do."""
    options = ("--engine", "embedded", "--logprobs-mode", "processed_logprobs")
    async with art_serve(served, *options, key=KEY) as (_, url):
        command = (str(PYTHON), str(PLACE / "openenv_validate.py"), url, MODEL, KEY)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 120)
    report = json.loads(out)
    assert (report["capture_level"], report["ok"], report["logprobs_mode"]) == ("tokens", True, "processed"), report
    assert report["param_fixes"] == [] and not [said for said in report["findings"] if "FATAL" in said], report
