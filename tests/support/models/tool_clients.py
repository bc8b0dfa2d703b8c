"""Clients that hold a conversation with a tool, and a policy that was taught to hold it with them.

A question, a call of the tool `add`, the tool's answer, a streamed reply. Each program in tests/clients/tools is one
client as its users use it; it prints what it got as one line of JSON. A model of random weights calls no tools, so
`teach` has `art sft` train an adapter of rank 16 on the transcripts: 10 s on one core.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from art_cli.runs.manifest import new_checkpoint, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from tests.support.models.tiny import tiny_config, tiny_tokenizer
from tests.support.paths import CLIENTS
from tests.support.processes import forked
from tests.support.standins.scripted import tool_call

Json = dict[str, Any]

PLACE = CLIENTS / "tools"
MODEL = "adder"
QUESTION, CALL, ANSWER = "What is 2 plus 3?", tool_call("add", a=2, b=3), "The sum is 5."
EXPECTED = {"calls": [["add", {"a": 2, "b": 3}]], "text": ANSWER, "refused": 401}
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
# As the programs that use a client without a framework around it send it.
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]
DEADLINE_S = 180.0


async def converse(program: str, url: str, key: str, *, python: Path = Path(sys.executable)) -> Json:
    """What the client's program printed, or {"error": the last line it wrote}. Arguments may follow its name."""
    name, *arguments = program.split()
    command = ["node" if name.endswith(".mjs") else str(python), str(PLACE / name), *arguments]
    variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
    root = url.removesuffix("/v1")
    variables |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODEL}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env={**os.environ, **variables})
    try:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        return {"error": (err.decode().strip().splitlines() or ["?"])[-1]}
    found: Json = json.loads(out.decode().strip().splitlines()[-1])
    return found


def is_right(found: Json) -> bool:
    return {**found, **EXPECTED} == found


def demo(tools: list[Json]) -> Json:
    """The whole conversation as a transcript."""
    question, result = (
        {"role": "user", "content": QUESTION},
        {"role": "tool", "tool_call_id": "call-add", "content": "5"},
    )
    return {"messages": [question, CALL, result, {"role": "assistant", "content": ANSWER}], "tools": tools}


# --- the policy -------------------------------------------------------------------------------------------------------


def build(directory: Path, length: int = 1024) -> None:
    """The base: a Qwen3 of 330k random parameters, a token per byte; heads of 32, the smallest that vLLM's CPU has.

    `length` is the most tokens of its context.
    """
    config = tiny_config(hidden=128)
    config.head_dim, config.max_position_embeddings = 32, length
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


def teach(place: Path, demos: Sequence[Json], *, length: int = 1024) -> RunDir:
    """A run in `place` whose only checkpoint, step 0, is the adapter that `art sft` makes of the transcripts."""
    run = RunDir(place / MODEL)
    build(place / "base", length)
    (place / "demos.jsonl").write_text("".join(json.dumps(demo) + "\n" for demo in demos))
    (place / "rollout.py").write_text("def rollout(policy, scenario):\n    return 0.0\n")
    (place / "scenarios.jsonl").write_text('{"id": "one"}\n')
    (place / "config.yaml").write_text(
        f"name: {MODEL}\nmodel: {{base: base, lora: {{rank: 16, alpha: 32}}, dtype: float32}}\n"
        "engine: {name: embedded}\nlearner: {name: torch, device: cpu}\n"
        "rollout: {entry: rollout.py:rollout, scenarios: scenarios.jsonl}\n"
        "sft: {demos: demos.jsonl, epochs: 60, batch_size: 16, learning_rate: 1.0e-2, warmup_steps: 5}\n"
    )
    command = ["sft", str(place / "config.yaml"), str(place / "demos.jsonl"), "-o", str(run.checkpoint_path(0))]
    forked.run(command, timeout=300).check_returncode()
    return run


def add_changed(run: RunDir, step: int) -> Path:
    """Another checkpoint of it: the first one's adapter with the sign of its B turned, so that it says other things.

    It has no proof, because no learner scored it.
    """
    first = run.checkpoint_path(0)
    manifest = msgspec.structs.replace(verify_checkpoint(first), origin=None, probe=None)
    with new_checkpoint(run.checkpoint_path(step), msgspec.structs.replace(manifest, step=step)) as new:
        for name in ("adapter_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(first / name, new / name)
        tensors = load_file(first / "adapter_model.safetensors")
        changed = {name: -value / step if "lora_B" in name else value for name, value in tensors.items()}
        save_file(changed, new / "adapter_model.safetensors", metadata={"format": "pt"})
    return run.checkpoint_path(step)
