"""The command line and environment of a vLLM server; vLLM and GPUs in a Python environment.

The user's own vLLM settings (`engine.args`, `engine.env`) come last and win. The schema rejects settings there that the
engine depends on (VLLM_OWN_ARGS and VLLM_OWN_ENV).

`find_vllm` runs a Python and returns its vLLM and GPUs, for `art doctor` and for choosing an engine. `free_share`
measures free GPU memory in a child process. Nothing else here starts a process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import JsonValue

from art_cli.config.sections.engine_config import ONLY_BFLOAT16, VllmEngineConfig
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.run_memory import ADAPTERS, MAX_SHARE, share
from art_cli.runtime.errors import EngineError
from art_cli.runtime.gpus import has_gpu as has_gpu
from art_cli.runtime.processes.child import child_environment

ONLY_16_BITS = "vLLM's LoRA kernels on a GPU take 16 bits only"
PROBE_DEADLINE_S = 120.0  # importing vLLM from a cold disk takes most of a minute
# Run by `python -m`, because community builds lack the `vllm` command.
MODULE = "vllm.entrypoints.launchers.api_server.entry"
GUARD = "art_vllm_guard.KeyGuard"  # added to the user's own --middleware
GUARD_DIRECTORY = Path(__file__).parent / "guard"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values accepted by vLLM's --max-lora-rank
QUANTIZATION = "bitsandbytes"  # provided by the plug-in vllm-bnb-plugin since vLLM 0.32
# Python variables from this environment, and torchrun's: with them the server would act as one of torchrun's workers.
NOT_INHERITED = frozenset(
    {
        *("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        "TORCHELASTIC_RUN_ID",
    }
)

# A program for the server's Python. It prints one JSON line even if packages are missing.
PROGRAM = """
import json, sys
found = {"version": None, "torch": None, "gpus": [], "has_bfloat16": True}
found |= {"architectures": [], "quantizations": [], "error": None}
try:
    import torch
    found["torch"] = torch.__version__
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["has_bfloat16"] = not found["gpus"] or torch.cuda.is_bf16_supported(including_emulation=False)
    import vllm
    import vllm.entrypoints.launchers.api_server.entry
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_general_plugins
    load_general_plugins()  # takes 0.03 s; vllm-bnb-plugin adds a method
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    found["architectures"] = sorted(ModelRegistry.get_supported_archs())
    found["quantizations"] = list(QUANTIZATION_METHODS)
    found["version"] = vllm.__version__
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""
# Prints free and total bytes for the leading GPUs, as vLLM will see them: each with another process's context on it.
MEMORY_PROGRAM = """
import json, sys, torch
memory = [torch.cuda.mem_get_info(i) for i in range(min(int(sys.argv[1]), torch.cuda.device_count()))]
sys.stdout.write("\\n" + json.dumps(memory) + "\\n")
"""


class VllmFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Example: VllmFacts(python="/opt/vllm/bin/python", version="0.32.0", torch="2.13.0", gpus=["NVIDIA H200"])."""

    python: str
    version: str | None = None  # vLLM's version; None when it cannot be imported
    torch: str | None = None
    gpus: list[str] = []  # names of GPUs visible to torch
    has_bfloat16: bool = True  # whether GPU 0 computes bfloat16
    architectures: list[str] = []  # supported transformers architectures: "Qwen3ForCausalLM"
    quantizations: list[str] = []  # quantization methods, including plugins: "bitsandbytes"
    error: str | None = None  # why something is missing, in one line

    def lacks(self, quantize: str | None) -> str:
        """Returns why vLLM cannot serve a base with this `model.quantize`; "" if it can."""
        if quantize is None or QUANTIZATION in self.quantizations:
            return ""
        return (
            f"vLLM {self.version} of {self.python} cannot serve model.quantize={quantize}: vllm-bnb-plugin is missing"
        )

    @property
    def plugin_cure(self) -> str:
        return f"{self.python} -m pip install vllm-bnb-plugin"


def find_vllm(python: Path | None = None) -> VllmFacts:
    """Returns the facts about a Python's vLLM, by default this Python's. Failures are stored in `error`."""
    program = str(python or sys.executable)
    try:
        done = _run([program, "-c", PROGRAM], child_environment())
        return msgspec.convert({"python": program, **msgspec.json.decode(_last_line(done.stdout))}, VllmFacts)
    except subprocess.TimeoutExpired:
        return VllmFacts(python=program, error=f"importing vLLM took longer than {PROBE_DEADLINE_S:.0f} s")
    except OSError as error:
        return VllmFacts(python=program, error=f"it cannot be run: {error.strerror}")
    except msgspec.MsgspecError:
        return VllmFacts(python=program, error=f"exit status {done.returncode}: {_last_line(done.stderr)}")


def _run(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(command, env=env, timeout=PROBE_DEADLINE_S, **streams)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def own_server(engine: object) -> VllmEngineConfig | None:
    """Returns the engine section if art starts this vLLM server itself."""
    return engine if isinstance(engine, VllmEngineConfig) and engine.base_url is None else None


def free_share(python: Path, num: int, environment: Mapping[str, str]) -> float | None:
    """Returns the largest memory share that vLLM can use on every one of the leading `num` GPUs.

    Returns None if torch in that Python reports nothing, in which case vLLM cannot start either. A child process
    measures the memory, so no CUDA context stays on the GPUs even if the learner runs in other processes.
    """
    own = {name: value for name, value in environment.items() if name not in NOT_INHERITED}
    try:
        done = _run([str(python), "-c", MEMORY_PROGRAM, str(num)], own)
        memory = msgspec.json.decode(_last_line(done.stdout), type=list[tuple[int, int]])
    except (subprocess.TimeoutExpired, OSError, msgspec.MsgspecError):
        return None
    return min((share(total, free) for free, total in memory), default=None)


def user_args(config: VllmEngineConfig) -> dict[str, JsonValue]:
    """Returns `engine.args` with names spelled as on vLLM's command line."""
    return {name.replace("_", "-"): value for name, value in config.args.items()}


def with_slots(config: VllmEngineConfig, num_policies: int) -> VllmEngineConfig:
    """Returns the configuration with adapter slots for several policies. The user's own arguments win."""
    if num_policies == 1:
        return config
    return config.model_copy(update={"args": {"max-loras": ADAPTERS * num_policies} | user_args(config)})


# --- the command line -------------------------------------------------------------------------------------------------


def command(
    config: VllmEngineConfig,
    model: PolicySpec,
    *,
    python: Path,
    port: int,
    name: str,
    template: Path | None,
    sleep: int,
    has_gpu: bool,
    memory_share: float = MAX_SHARE,
) -> list[str]:
    """Returns the server's argv, without any secret. `name` is the served name of the base model."""
    arguments: dict[str, JsonValue] = {
        "model": model.base,
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": model.dtype,
        "max-model-len": model.max_length,
        "enable-lora": True,
        "max-loras": ADAPTERS,
        "max-lora-rank": rank_slot(model),
        "logprobs-mode": "processed_logprobs",  # logprobs after temperature, top_p and top_k
        "generation-config": "vllm",  # ignores sampling defaults in the model's generation_config.json
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "seed": 0,
        "disable-uvicorn-access-log": True,
        "chat-template": None if template is None else str(template),
    }
    if not has_gpu:
        # vLLM 0.32 rewinds the generator of a seeded request whose prompt is computed in parts, and torch's CPU
        # generators cannot be rewound: the engine core dies. Every request in a rollout has a seed.
        arguments["enable-chunked-prefill"] = False
    else:
        arguments["gpu-memory-utilization"] = memory_share
    if model.quantize is not None:
        if model.dtype == "float32":
            raise EngineError(f"model.quantize: {ONLY_BFLOAT16}; set engine=embedded")
        arguments["quantization"] = QUANTIZATION
    if has_gpu and model.dtype == "float32":
        raise EngineError(f"model.dtype: {ONLY_16_BITS}, and this run has float32; set engine=embedded")
    if model.lora_targets:  # otherwise vLLM reserves adapters for all experts, 1.7 GB with Qwen3-30B-A3B
        arguments["lora-target-modules"] = list(model.lora_targets)
    if sleep:
        arguments["enable-sleep-mode"] = True
    arguments |= user_args(config)
    if (replicas := num_replicas(config)) > 1:
        arguments["data-parallel-size"] = replicas
    return [str(python), "-m", MODULE, *_flags(arguments), "--middleware", GUARD]


def rank_slot(model: PolicySpec) -> int:
    """Returns the largest adapter rank of a server for this policy. Raises EngineError above vLLM's limit."""
    rank = model.lora_rank or 1
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise EngineError(f"model.lora.rank: {rank} is more than vLLM can serve ({LORA_RANKS[-1]}); use engine=embedded")


def _flags(arguments: Mapping[str, JsonValue]) -> list[str]:
    """{"a": 1, "b": true, "c": false, "d": null, "e": [1, 2]} -> --a 1 --b --no-c --e 1 2"""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(_text, value if isinstance(value, list) else [value])]
    return flags


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- the environment --------------------------------------------------------------------------------------------------


def environment(
    config: VllmEngineConfig,
    model: PolicySpec,
    *,
    inherited: Mapping[str, str],
    key: str,
    sockets: Path,
    sleep: int,
    has_gpu: bool,
) -> dict[str, str]:
    """Returns the server's environment, the only place with its key. The processes' sockets are in `sockets`."""
    variables = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_RPC_BASE_PATH": str(sockets)}
    if not has_gpu:
        # nobind, because pinned threads stall for seconds if CPUs are shared or limited by cgroups
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
    if Path(model.base).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    variables = {**defaults, **variables, **config.env}
    own_path = config.env.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join([str(GUARD_DIRECTORY), *([own_path] if own_path else [])])
    variables |= {"VLLM_API_KEY": key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if sleep:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # adds routes for sleep and wake
    return variables


# --- one GPU for both -------------------------------------------------------------------------------------------------


def sleep_level(config: VllmEngineConfig, model: PolicySpec, *, inherited: Mapping[str, str], has_gpu: bool) -> int:
    """Returns vLLM's sleep level 1 or 2; 0 if the server keeps its memory. Raises EngineError without a GPU."""
    if not has_gpu:
        if config.sleep not in ("auto", 0):
            raise EngineError(f"engine.sleep: {config.sleep} needs a GPU; vLLM does not sleep on a CPU: leave it auto")
        return 0
    if config.sleep != "auto":
        return config.sleep
    return 1 if shares_gpu(config, model.learner_device, model.learner_gpus, inherited) else 0


def shares_gpu(
    config: VllmEngineConfig, learner_device: str | None, learner_gpus: int, inherited: Mapping[str, str]
) -> bool:
    """Returns True if the server and the learner have a GPU in common.

    The learner uses `learner_gpus` GPUs starting at `learner_device`. GPUs are compared by their system names.
    """
    if learner_device is None or not learner_device.startswith("cuda"):
        return False
    first = int(learner_device.partition(":")[2] or 0)
    ours = _named(_visible(inherited), range(first, first + learner_gpus))
    return not ours.isdisjoint(_named(_visible({**inherited, **config.env}), range(num_gpus(config))))


def _named(visible: Sequence[str], indices: Sequence[int]) -> set[str]:
    """Returns the system names of GPUs given by index among the visible GPUs."""
    return {visible[i] if visible else str(i) for i in indices if not visible or i < len(visible)}


def own_share(config: VllmEngineConfig) -> float | None:
    """Returns the GPU memory share set by the user; None if art decides."""
    own = user_args(config).get("gpu-memory-utilization")
    return None if own is None else float(str(own))


def _visible(variables: Mapping[str, str]) -> Sequence[str]:
    """Returns CUDA_VISIBLE_DEVICES as a list, empty if all GPUs are visible."""
    return [name.strip() for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


# --- several GPUs -----------------------------------------------------------------------------------------------------


def num_gpus(config: VllmEngineConfig) -> int:
    """Returns how many GPUs the server needs: replicas times tensor and pipeline parallel sizes."""
    sizes = [int(str(user_args(config).get(f"{kind}-parallel-size") or 1)) for kind in ("tensor", "pipeline")]
    return num_replicas(config) * sizes[0] * sizes[1]


def num_replicas(config: VllmEngineConfig) -> int:
    """Returns vLLM's data parallel size: `engine.replicas` times the user's own data-parallel-size."""
    return config.replicas * int(str(user_args(config).get("data-parallel-size") or 1))


def check_gpus(config: VllmEngineConfig) -> None:
    """Raises EngineError if fewer GPUs are visible than the replicas need."""
    num, visible = num_gpus(config), len(visible_gpus({**os.environ, **config.env}))
    if config.replicas > 1 and visible < num:
        each = num // config.replicas
        raise EngineError(
            f"engine.replicas: {config.replicas} of {each} GPU{'s' if each > 1 else ''} each need {num}, and {visible} "
            "can be seen; set fewer, or name the GPUs in engine.env.CUDA_VISIBLE_DEVICES"
        )


def visible_gpus(variables: Mapping[str, str]) -> Sequence[str]:
    """Returns the names of the GPUs usable in this environment. Call it only if `has_gpu` found GPUs."""
    if visible := _visible(variables):
        return visible
    number = len(list(Path("/dev").glob("nvidia[0-9]*"))) or len(list(Path("/dev/dri").glob("renderD*"))) or 1
    return [str(index) for index in range(number)]
