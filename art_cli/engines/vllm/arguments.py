"""The command line and environment of a server, from the configuration and the model; the vLLM and GPUs of a Python.

The user's own settings, under vLLM's names (`engine.args`, `engine.env`), come last and win. The schema refuses there
what the engine depends on (VLLM_OWN_ARGS and VLLM_OWN_ENV).

`find_vllm` runs a Python and returns which vLLM and GPUs it has, for `art doctor` and the choice of an engine.
`free_share` runs one and returns the share of the GPUs that vLLM may take. Nothing else here runs a process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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

# A program for the other Python. It prints one JSON line, whatever is missing there.
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


class VllmFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Example: VllmFacts(python="/opt/vllm/bin/python", version="0.32.0", torch="2.13.0", gpus=["NVIDIA H200"])."""

    python: str
    version: str | None = None  # vLLM's; None where it cannot be imported
    torch: str | None = None
    gpus: list[str] = []  # names of the GPUs that torch sees there
    has_bfloat16: bool = True  # False: the first GPU computes no bfloat16
    architectures: list[str] = []  # the transformers architectures that it serves: "Qwen3ForCausalLM"
    quantizations: list[str] = []  # methods that it and its plugins have: "bitsandbytes"
    error: str | None = None  # why something is missing, one line

    def lacks(self, quantize: str | None) -> str:
        """Returns the reason why it cannot serve a base with that `model.quantize`, or "" if it can."""
        if quantize is None or QUANTIZATION in self.quantizations:
            return ""
        return (
            f"vLLM {self.version} of {self.python} cannot serve model.quantize={quantize}: vllm-bnb-plugin is missing"
        )

    @property
    def plugin_cure(self) -> str:
        return f"{self.python} -m pip install vllm-bnb-plugin"


def find_vllm(python: Path | None = None, *, timeout_s: float = PROBE_DEADLINE_S) -> VllmFacts:
    """Returns the facts about a Python's vLLM; `python` None is this one. A failure is their `error`."""
    program = str(python or sys.executable)
    try:
        done = subprocess.run(
            [program, "-c", PROGRAM],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=child_environment(),
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


def own_server(engine: object) -> VllmEngineConfig | None:
    """Returns the section of a vLLM that art starts, or None for any other engine."""
    return engine if isinstance(engine, VllmEngineConfig) and engine.base_url is None else None


# Another program for it. It prints the free and the total bytes of each of the first GPUs, as vLLM will see them: with
# the context of one more process on each.
MEMORY_PROGRAM = """
import json, sys, torch
memory = [torch.cuda.mem_get_info(i) for i in range(min(int(sys.argv[1]), torch.cuda.device_count()))]
sys.stdout.write("\\n" + json.dumps(memory) + "\\n")
"""


def free_share(
    python: Path, num: int, environment: Mapping[str, str], *, timeout_s: float = PROBE_DEADLINE_S
) -> float | None:
    """Returns the share of each of the first `num` GPUs that vLLM may take of what is free there now, or None if the
    torch of that Python cannot tell, so that vLLM cannot start either.

    A process of its own asks, so that no context stays on the GPUs, also where the learner is in other processes.
    """
    own = {name: value for name, value in environment.items() if name not in NOT_INHERITED}
    command = [str(python), "-c", MEMORY_PROGRAM, str(num)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=own, timeout=timeout_s)
        memory = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=list[tuple[int, int]])
    except (subprocess.TimeoutExpired, OSError, msgspec.MsgspecError):
        return None
    return min((share(total, free) for free, total in memory), default=None)


# Run by `python -m`, because community builds lack the `vllm` command.
MODULE = "vllm.entrypoints.launchers.api_server.entry"
GUARD = "art_vllm_guard.KeyGuard"  # added to the user's own --middleware
GUARD_DIRECTORY = Path(__file__).parent / "guard"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's --max-lora-rank takes
QUANTIZATION = "bitsandbytes"  # of the plug-in vllm-bnb-plugin since vLLM 0.32

# Variables of this environment, and of torchrun, which would make the server take itself for one of its workers.
NOT_INHERITED = frozenset(
    {
        *("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        "TORCHELASTIC_RUN_ID",
    }
)


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
    """Returns the server's argv, without any secret. `name` is the base model's name there."""
    arguments: dict[str, JsonValue] = {
        "model": model.base,
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": model.dtype,
        "max-model-len": model.max_length,
        "enable-lora": True,
        "max-loras": ADAPTERS,
        "max-lora-rank": _lora_rank(model.lora_rank or 1),
        "logprobs-mode": "processed_logprobs",  # logprobs after temperature, top_p and top_k
        "generation-config": "vllm",  # ignores the sampling defaults in the model's generation_config.json
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "seed": 0,
        "disable-uvicorn-access-log": True,
        "chat-template": None if template is None else str(template),
    }
    if not has_gpu:
        # vLLM 0.32 sets back the generator of a request with a seed whose prompt is computed in parts, and torch's
        # generators for the CPU cannot be set back: the engine core ends. Every request of a rollout has a seed.
        arguments["enable-chunked-prefill"] = False
    else:
        arguments["gpu-memory-utilization"] = memory_share
    if model.quantize is not None:
        if model.dtype == "float32":
            raise EngineError(f"model.quantize: {ONLY_BFLOAT16}; set engine=embedded")
        arguments["quantization"] = QUANTIZATION
    if has_gpu and model.dtype == "float32":
        raise EngineError(f"model.dtype: {ONLY_16_BITS}, and this run has float32; set engine=embedded")
    if model.lora_targets:  # without it vLLM keeps room for an adapter of each expert, 1.7 GB of Qwen3-30B-A3B
        arguments["lora-target-modules"] = list(model.lora_targets)
    if sleep:
        arguments["enable-sleep-mode"] = True
    arguments |= {name.replace("_", "-"): value for name, value in config.args.items()}
    if (replicas := num_replicas(config)) > 1:
        arguments["data-parallel-size"] = replicas
    return [str(python), "-m", MODULE, *_flags(arguments), "--middleware", GUARD]


def _lora_rank(rank: int) -> int:
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
    """Returns the server's environment, which alone holds the key. Its processes' sockets are in `sockets`."""
    variables = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", "VLLM_RPC_BASE_PATH": str(sockets)}
    if not has_gpu:
        # nobind, because pinned threads stall for seconds where CPUs are shared or limited by cgroups
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
    if Path(model.base).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    variables = {**defaults, **variables, **config.env}
    own_path = config.env.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join([str(GUARD_DIRECTORY), *([own_path] if own_path else [])])
    variables |= {"VLLM_API_KEY": key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if sleep:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # adds the routes to sleep and wake
    return variables


# --- one GPU for both -------------------------------------------------------------------------------------------------


def sleep_level(config: VllmEngineConfig, model: PolicySpec, *, inherited: Mapping[str, str], has_gpu: bool) -> int:
    """vLLM's level 1 or 2, or 0 where the server keeps its memory. Raises EngineError: a level without a GPU."""
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
    """Returns whether a GPU of the server is one of the learner's, which are `learner_gpus` from `learner_device` on.

    Both are named as the system names them.
    """
    if learner_device is None or not learner_device.startswith("cuda"):
        return False
    first = int(learner_device.partition(":")[2] or 0)
    ours = _named(_visible(inherited), range(first, first + learner_gpus))
    return not ours.isdisjoint(_named(_visible({**inherited, **config.env}), range(num_gpus(config))))


def _named(visible: Sequence[str], indices: Sequence[int]) -> set[str]:
    """Returns the system's names of the GPUs with these indices among the visible ones."""
    return {visible[i] if visible else str(i) for i in indices if not visible or i < len(visible)}


def own_share(config: VllmEngineConfig) -> float | None:
    """Returns the share of a GPU that the user gives to vLLM, or None if art decides it."""
    own = {name.replace("_", "-"): value for name, value in config.args.items()}.get("gpu-memory-utilization")
    return None if own is None else float(str(own))


def _visible(variables: Mapping[str, str]) -> Sequence[str]:
    """CUDA_VISIBLE_DEVICES as a list, which is empty where all GPUs are visible."""
    return [name.strip() for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


# --- several GPUs -----------------------------------------------------------------------------------------------------


def num_gpus(config: VllmEngineConfig) -> int:
    """Returns how many GPUs the server needs: its replicas, each of tensor by pipeline parallel size."""
    sizes = {name.replace("_", "-"): value for name, value in config.args.items()}
    total = num_replicas(config)
    for kind in ("tensor", "pipeline"):
        total *= int(str(sizes.get(f"{kind}-parallel-size") or 1))
    return total


def num_replicas(config: VllmEngineConfig) -> int:
    """Returns vLLM's data parallel size: `engine.replicas`, times the user's own argument where there is one."""
    own = config.args.get("data-parallel-size") or config.args.get("data_parallel_size") or 1
    return config.replicas * int(str(own))


def check_gpus(config: VllmEngineConfig) -> None:
    """Raises EngineError if this machine shows fewer GPUs than the replicas need."""
    num, visible = num_gpus(config), len(visible_gpus({**os.environ, **config.env}))
    if config.replicas > 1 and visible < num:
        each = num // config.replicas
        raise EngineError(
            f"engine.replicas: {config.replicas} of {each} GPU{'s' if each > 1 else ''} each need {num}, and {visible} "
            "can be seen; set fewer, or name the GPUs in engine.env.CUDA_VISIBLE_DEVICES"
        )


def visible_gpus(variables: Mapping[str, str]) -> Sequence[str]:
    """Returns the names of the GPUs that a server with that environment can use, on a machine that has some."""
    return _visible(variables) or _gpu_indices()


def _gpu_indices() -> list[str]:
    """Returns the indices of this machine's GPUs, by their device files; at least the one that `has_gpu` found."""
    number = len(list(Path("/dev").glob("nvidia[0-9]*"))) or len(list(Path("/dev/dri").glob("renderD*"))) or 1
    return [str(index) for index in range(number)]
