"""The vLLM and GPUs of a Python, found by running it, for `art doctor` and the choice of an engine."""

import subprocess
import sys
from pathlib import Path

import msgspec

PROBE_DEADLINE_S = 120.0  # importing vLLM from a cold disk takes most of a minute

# A program for the other Python. It prints one JSON line, whatever is missing there.
PROGRAM = """
import json, sys
found = {"version": None, "torch": None, "gpus": [], "architectures": [], "error": None}
try:
    import torch
    found["torch"] = torch.__version__
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    import vllm
    import vllm.entrypoints.openai.api_server
    from vllm.model_executor.models import ModelRegistry
    found["architectures"] = sorted(ModelRegistry.get_supported_archs())
    found["version"] = vllm.__version__
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


class VllmFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Example: VllmFacts(python="/opt/vllm/bin/python", version="0.32.0", torch="2.13.0", gpus=["NVIDIA H200"])."""

    python: str
    version: str | None = None  # vLLM's; None where it cannot be imported
    torch: str | None = None
    gpus: list[str] = []  # names of the GPUs that torch sees there
    architectures: list[str] = []  # the transformers architectures that it serves: "Qwen3ForCausalLM"
    error: str | None = None  # why something is missing, one line


def find_vllm(python: Path | None = None, *, timeout_s: float = PROBE_DEADLINE_S) -> VllmFacts:
    """Returns the facts about a Python's vLLM; `python` None is this one. A failure is their `error`."""
    program = str(python or sys.executable)
    try:
        done = subprocess.run(
            [program, "-c", PROGRAM], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
        line = done.stdout.strip().rpartition("\n")[2]
        return msgspec.convert({"python": program, **msgspec.json.decode(line)}, VllmFacts)
    except subprocess.TimeoutExpired:
        return VllmFacts(python=program, error=f"importing vLLM took longer than {timeout_s:.0f} s")
    except OSError as error:
        return VllmFacts(python=program, error=f"it cannot be run: {error.strerror}")
    except msgspec.MsgspecError:
        last = done.stderr.strip().rpartition("\n")[2]
        return VllmFacts(python=program, error=f"exit status {done.returncode}: {last}")
