"""Detects GPUs without torch: device files, driver, memory, and the kernel compiler."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROBE_TIMEOUT_S = 20.0  # timeout for nvidia-smi or another Python
NVIDIA = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))  # Linux; WSL, from the Windows driver
OTHERS = (Path("/dev/kfd"), Path("/dev/dxg"))
DRIVER = Path("/sys/module/nvidia/version")
OLDEST_DRIVER = {"12": 525, "13": 580}  # by CUDA's major version; source: NVIDIA, CUDA Compatibility
SMI = ("nvidia-smi", "--format=csv,noheader")
INCLUDE = "import sysconfig; print(sysconfig.get_paths('posix_prefix')['include'])"  # Triton looks for Python.h there


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Returns True if this machine has a GPU: an NVIDIA or AMD device file, not hidden by the environment."""
    return not _is_hidden(environment) and any(path.exists() for path in (*NVIDIA, *OTHERS))


def has_nvidia(environment: Mapping[str, str]) -> bool:
    """Returns True for an NVIDIA GPU. The other device files also exist for integrated graphics."""
    return not _is_hidden(environment) and any(path.exists() for path in NVIDIA)


def _is_hidden(environment: Mapping[str, str]) -> bool:
    return environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def driver() -> str:
    """Returns NVIDIA's driver version; "" if unknown."""
    with contextlib.suppress(OSError):
        return DRIVER.read_text(errors="replace").strip()[:20]
    return _output(*SMI, "--query-gpu=driver_version").partition("\n")[0][:20]


def cards() -> list[str]:
    """Returns a line per nvidia-smi card, "NVIDIA H100 80GB HBM3, 20480 MiB, 81559 MiB", free memory first."""
    return _output(*SMI, "--query-gpu=name,memory.free,memory.total").splitlines()


def idle_gpu(torch: str, cuda: str | None, reason: str, driver: str) -> str:
    """Explains why torch does not use the local GPU, with a fix.

    `torch` and `cuda` are the wheel's versions, and `reason` is torch's own message. Example: idle_gpu("2.13.0",
    "13.0", "The NVIDIA driver on your system is too old", "570.86.15")
    """
    here = f"this machine has an NVIDIA GPU (driver {driver or 'unknown'}), and torch {torch}"
    if cuda is None:
        return f"{here} is built without CUDA: install a build of torch with CUDA"
    said = reason.strip().split(". ")[0].splitlines()[0][:200] if reason.strip() else "no reason given"
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
    major = re.match(r"\d+", driver)
    if oldest is None or (major and int(major[0]) >= oldest):
        cure = "nvidia-smi must work here first; in a container, pass the GPU on (docker run --gpus all)"
    else:
        cure = (
            f"install driver {oldest} or newer, or cuda-compat with VLLM_ENABLE_CUDA_COMPATIBILITY=1, "
            "or a torch for an older CUDA"
        )
    return f"{here} with CUDA {cuda} does not use it: {said}; {cure}"


def unknown_gpu(torch: str, name: str, capability: tuple[int, int], kernels: Sequence[str]) -> str:
    """Explains why torch has no kernels for a GPU, with a fix; "" if it has some. Every kernel would fail.

    `kernels` is the wheel's list: machine code runs on its own generation of GPUs, intermediate code on later ones too.
    Example: unknown_gpu("2.13.0", "Tesla V100-SXM2-16GB", (7, 0), ["sm_75", "sm_80", "compute_120"])
    """
    own = 10 * capability[0] + capability[1]
    numbers = [(kind, int(number)) for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(kernels))]
    if not numbers or any(n <= own and (kind == "compute" or n // 10 == own // 10) for kind, n in numbers):
        return ""
    cure = "an older CUDA (https://pytorch.org/get-started/locally)" if own < numbers[0][1] else "a newer CUDA"
    generation = f"compute capability {capability[0]}.{capability[1]}"
    return f"torch {torch} has no kernels for this machine's {name} ({generation}): install a torch for {cure}"


def compiler_problem(python: Path | None, environment: Mapping[str, str]) -> str:
    """Explains why Triton cannot compile its launcher for `python`, by default this Python; "" if it can."""
    missing = []
    path = environment.get("PATH")
    compilers = [environment["CC"]] if "CC" in environment else ["gcc", "clang"]
    if not any(shutil.which(each, path=path) for each in compilers):
        missing.append(f"a C compiler ({' or '.join(compilers)})")
    include = _output(str(python or sys.executable), "-c", INCLUDE).strip()
    if include and not (Path(include) / "Python.h").is_file():
        missing.append(f"{include}/Python.h")
    return f"{' and '.join(missing)} missing" if missing else ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
