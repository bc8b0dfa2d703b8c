"""`art doctor`: shows working parts, and commands for installing missing parts. Changes nothing.

The exit code is 1 if an installed part does not work. Missing optional parts are not errors. Values of API keys are
never printed. --bundle writes a bug report: findings, packages, and the first part of a run's logs.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from art_cli.cli import Finding, Json, print_findings
from art_cli.runtime import gpus
from art_cli.runtime.allocator import memory_size
from art_cli.runtime.errors import ArtError, UsageError
from art_cli.runtime.openmp import num_cores

if TYPE_CHECKING:
    from art_cli.loop.engine_choice import Machine

BASE = ("typer", "pydantic", "hydra-core", "omegaconf", "openai", "aiohttp", "msgspec", "starlette", "uvicorn")
EXTRAS = {  # extra -> (packages, purpose)
    "train": (("torch", "transformers", "peft", "safetensors", "numpy"), "training, and the embedded engine"),
    "litellm": (("litellm",), "judges of other providers than OpenAI, and prices"),
    "vllm": (("vllm",), "the vLLM engine, on a GPU"),
    "unsloth": (("unsloth",), "the Unsloth learner, on a GPU"),
    "tinker": (("tinker",), "training and sampling on a server of the Tinker protocol"),
    "wandb": (("wandb",), "the Weights & Biases tracker"),
    "tensorboard": (("tensorboard",), "the TensorBoard tracker"),
    "mlflow": (("mlflow-skinny", "sqlalchemy", "alembic"), "the MLflow tracker"),
    "trackio": (("trackio",), "the trackio tracker"),
    "otel": (("opentelemetry-proto",), "the OpenTelemetry and Langfuse trackers, and art log --otlp"),
    "storage": (("fsspec",), "runs in an object store"),
    "s3": (("s3fs",), "runs in S3 and what speaks like it"),
    "reasoning-gym": (("reasoning_gym",), "its puzzles as environments"),
    "textarena": (("textarena",), "its games as environments"),
    "ray": (("ray",), "rollouts on the nodes of a Ray cluster"),
    "mcp": (("mcp",), "the tools of MCP servers as environments"),
    "prompt": (("gepa",), "the search for a better prompt (learner=prompt)"),
    "data": (("datasets", "duckdb"), "scenarios from the hub, Parquet and SQL"),
    "gguf": (("gguf",), "a GGUF file as the base, and art export --gguf"),
    "quantize": (("bitsandbytes",), "a base in 4 bits (model.quantize)"),
}
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "LANGFUSE_SECRET_KEY")
GIB = 1024**3
LOG_HEAD = 2**16  # bytes of each log in a bug report


def run(
    as_json: Json = False,
    bundle: Annotated[
        Path | None, Option("--bundle", metavar="FILE", help="Write a bug report, without secrets.")
    ] = None,
    run_directory: Annotated[Path | None, Option("--run", metavar="DIR", help="The run with the logs.")] = None,
) -> None:
    """Check this machine's installation."""
    findings = list(examine())
    print_findings(findings, as_json)
    if bundle is not None:
        _write_bundle(bundle, findings, run_directory)
    if broken := [finding.name for finding in findings if not finding.is_good]:
        raise ArtError(f"does not work: {', '.join(broken)}; each line above names the cure")


def examine() -> Iterator[Finding]:
    is_good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("python", is_good, platform.python_version(), "" if is_good else "use Python 3.11, 3.12 or 3.13")
    free = shutil.disk_usage(Path.cwd()).free / GIB
    message = (
        f"{platform.system()} {platform.machine()}, {num_cores()} cores, {memory_size() / GIB:.0f} GiB memory, "
        f"{free:.0f} GiB disk free"
    )
    yield Finding("machine", True, message, "free some: a base model takes gigabytes" if free < 2 else "")
    yield from check_gpu()
    yield _check_base()
    for extra, (modules, purpose) in EXTRAS.items():
        yield _check_extra(extra, modules, purpose)
    yield from check_auto()
    from art_cli.config.overrides import groups, variant_names
    from art_cli.config.schema import RunConfig

    there_are = [f"{group} ({', '.join(variant_names(RunConfig, group))})" for group in groups(RunConfig)]
    yield Finding("configs", True, "; ".join(there_are))
    names = [name for name in KEYS if os.environ.get(name)]
    yield Finding("keys", True, ", ".join(names) if names else f"none of {', '.join(KEYS)} is set")


def check_gpu(python: Path | None = None) -> Iterator[Finding]:
    """Yields findings about NVIDIA GPUs: driver, memory, and the compilers for kernels here and in `python`."""
    if not gpus.has_nvidia(os.environ):
        return
    memory = "; ".join(gpus.cards()) or "unknown, because nvidia-smi does not work"
    yield Finding("gpu", True, f"driver {gpus.driver() or 'unknown'}; free and whole memory: {memory}")
    for each in dict.fromkeys([None, python]):
        problem = gpus.compiler_problem(each, os.environ)
        message = f"{each or 'this Python'}: {problem or 'a C compiler and Python.h are here'}"
        yield Finding("kernels", not problem, message, "apt install gcc python3-dev" if problem else "")


def _check_base() -> Finding:
    missing = [name for name in BASE if _version(name) is None]
    if missing:
        return Finding("art", False, f"not installed: {', '.join(missing)}", "pip install art-cli")
    return Finding("art", True, f"{_version('art-cli')}, {', '.join(f'{name} {_version(name)}' for name in BASE)}")


def _check_extra(extra: str, modules: tuple[str, ...], purpose: str) -> Finding:
    cure = f"pip install 'art-cli[{extra}]'"
    missing = [name for name in modules if _version(name) is None]
    if missing:
        return Finding(extra, True, f"{', '.join(missing)} not installed; for {purpose}", cure, is_missing=True)
    versions = ", ".join(f"{name} {_version(name)}" for name in modules)
    try:
        detail = PROOFS[extra]() if extra in PROOFS else ""
    except Exception as error:  # a broken package may raise anything
        line = " ".join(str(error).split())[:200]
        return Finding(extra, False, f"{versions}: {type(error).__name__}: {line}", f"{cure} with its constraints")
    return Finding(extra, True, versions + detail)


def _prove_train() -> str:
    """Multiplies matrices on the device, and imports the model classes."""
    torch = import_module("torch")
    import_module("peft")
    assert import_module("transformers").AutoModelForCausalLM
    if problem := import_module("art_cli.models.device").idle_gpu():
        raise RuntimeError(problem)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(4, 4, device=device)
    assert float((ones @ ones).sum()) == 64.0, "4 x 4 ones times 4 x 4 ones is not 64 in sum"
    if device == "cpu":
        return f"; no GPU, {torch.get_num_threads()} threads"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return "; " + ", ".join(f"{gpu.name} {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus)


PROOFS: dict[str, Callable[[], str]] = {"train": _prove_train}


def check_auto(machine: "Machine | None" = None) -> Iterator[Finding]:
    """Yields the automatic engine and learner for a LoRA on a published model, with reasons."""
    from art_cli.loop.engine_choice import Machine, choose_engine

    machine = machine or Machine()
    choice = choose_engine(machine)
    message = f"auto chooses {choice.name}: {choice.reason}"
    if choice.name == "vllm" and (num := machine.num_gpus()) > 1:
        message += f"; 1 server, engine.replicas starts up to {num} on the {num} GPUs"
    yield Finding("engine", not choice.is_broken, message, choice.cure)
    yield Finding("learner", True, "auto chooses torch: it trains packs, and Unsloth one row at a time")


def _write_bundle(path: Path, findings: list[Finding], run: Path | None) -> None:
    """Writes findings, packages and the first part of a run's logs, without secrets."""
    from art_cli.runs.durable import write_file
    from art_cli.runtime.secrets import find_secrets, load_environment

    load_environment(Path.cwd())
    root = (run or Path.cwd()).resolve()
    if not root.is_dir():
        raise UsageError(f"--run {run}: not a directory")
    lines = [f"{each.state} {each.name}: {each.message}" for each in findings]
    lines += ["", *sorted({f"{each.metadata['Name']}=={each.version}" for each in distributions()}, key=str.lower)]
    found = root.glob("logs/*.log" if run else "runs/*/logs/*.log")
    logs = [log for log in found if log.is_file() and log.resolve() == log]  # no links to other files
    newest = max(logs, key=lambda log: log.stat().st_mtime).parent if logs else None
    for log in sorted(log for log in logs if log.parent == newest):
        with log.open("rb") as file:
            lines += ["", f"--- {log}", file.read(LOG_HEAD).decode(errors="replace")]
    write_file(path, find_secrets(os.environ).redact("\n".join(lines)).encode())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
