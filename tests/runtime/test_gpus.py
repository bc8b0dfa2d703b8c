"""A GPU that the system shows and torch does not use is an error with its cure; what compiles kernels is looked for."""

import os
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch

from art_cli.cli import doctor
from art_cli.cli.preflight.preflight import Preflight
from art_cli.config.compose import load_config
from art_cli.models.device import pick_device
from art_cli.runtime import gpus
from art_cli.runtime.allocator import is_out_of_memory
from art_cli.runtime.errors import UsageError
from tests.support.paths import LETTERS

OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by downloading"


@pytest.mark.parametrize(
    ("cuda", "driver", "cure"),
    [
        ("13.0", "570.86.15", "install driver 580 or newer, or cuda-compat"),
        ("12.8", "470.42", "install driver 525 or newer"),
        ("13.0", "", "install driver 580 or newer"),
        ("13.0", "580.95.05", "nvidia-smi must work here first"),
        ("19.0", "580.95.05", "nvidia-smi must work here first"),
        (None, "580.95.05", "install a build of torch with CUDA"),
    ],
)
def test_an_idle_gpu_has_a_cure_that_follows_from_driver_and_wheel(cuda: str | None, driver: str, cure: str) -> None:
    said = gpus.idle_gpu("2.13.0", cuda, OLD, driver)
    assert cure in said and f"(driver {driver or 'unknown'})" in said and "torch 2.13.0" in said
    assert "\n" not in said and "downloading" not in said
    assert cuda is None or f"CUDA {cuda} does not use it: The NVIDIA driver on your system is too old" in said


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that shows an NVIDIA GPU; a directory for its programs, which alone are on the PATH."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "version").write_text("570.86.15\n")
    monkeypatch.setattr(gpus, "NVIDIA", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch uses the GPU here")
def test_auto_is_not_the_cpu_where_a_gpu_is_idle(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"driver 570\.86\.15.*or set learner\.device=cpu, or CUDA_VISIBLE_DEVICES="):
        pick_device("auto")
    assert pick_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto") == "cpu"


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120", "compute_120"]  # as of torch 2.13 for CUDA 13


@pytest.mark.parametrize(
    ("capability", "kernels", "cure"),
    [
        ((7, 0), WHEEL, "an older CUDA"),  # V100
        ((6, 1), WHEEL, "an older CUDA"),  # GTX 1080
        ((7, 5), WHEEL, ""),
        ((8, 7), WHEEL, ""),
        ((8, 9), WHEEL, ""),
        ((12, 1), WHEEL, ""),
        ((13, 0), WHEEL, ""),  # compiled from the intermediate code
        ((12, 0), WHEEL[:4], "a newer CUDA"),
        ((7, 0), [], ""),
        ((9, 0), ["gfx90a", "gfx942"], ""),  # AMD's
    ],
)
def test_a_gpu_that_the_wheel_has_no_kernels_for_has_a_cure(
    capability: tuple[int, int], kernels: list[str], cure: str
) -> None:
    said = gpus.unknown_gpu("2.13.0", "Tesla V100-SXM2-16GB", capability, kernels)
    assert bool(said) == bool(cure) and cure in said


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_such_a_gpu_is_not_picked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in {
        "is_available": True,
        "get_device_name": "Tesla V100-SXM2-16GB",
        "get_device_capability": (7, 0),
        "get_arch_list": WHEEL,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *index, found=found: found)
    with pytest.raises(UsageError, match=r"no kernels for .*V100.* 7\.0\).*or set learner\.device=cpu"):
        pick_device(device)
    train = doctor._check_extra("train", *doctor.EXTRAS["train"])
    assert train.state == "broken" and "no kernels for" in train.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch uses the GPU here")
def test_doctor_calls_an_idle_gpu_broken(shown: Path) -> None:
    train = doctor._check_extra("train", *doctor.EXTRAS["train"])
    assert train.state == "broken" and "driver 570.86.15" in train.message


def test_doctor_shows_driver_and_free_memory(shown: Path) -> None:
    program(shown / "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 20480 MiB, 81559 MiB'; echo 'GB10, [N/A], [N/A]'")
    program(shown / "gcc", "")
    gpu, kernels = doctor.check_gpu()
    listed = "NVIDIA H100 80GB HBM3, 20480 MiB, 81559 MiB; GB10, [N/A], [N/A]"
    assert gpu.message == f"driver 570.86.15; free and whole memory: {listed}"
    has_header = (Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h").is_file()
    assert kernels.is_good == has_header


def test_doctor_works_where_nvidia_smi_does_not(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(shown / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert next(doctor.check_gpu()).message.endswith("memory: unknown, because nvidia-smi does not work")
    monkeypatch.setattr(gpus, "DRIVER", shown / "no such file")
    assert gpus.driver() == ""
    program(shown / "nvidia-smi", "printf '580.95.05\\n580.95.05\\n'")
    assert gpus.driver() == "580.95.05"


def test_a_python_without_header_or_compiler_is_a_finding_with_its_cure(shown: Path, tmp_path: Path) -> None:
    """Triton compiles its launcher when vLLM loads its first kernel; Ubuntu's python3 has no header."""
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    program(bare, f"echo {tmp_path}/include")
    program(whole, f"echo {tmp_path}")
    (tmp_path / "Python.h").touch()
    assert gpus.compiler_problem(whole, os.environ) == "a C compiler (gcc or clang) missing"
    assert gpus.compiler_problem(whole, {**os.environ, "CC": sys.executable}) == ""
    program(shown / "clang", "")
    assert gpus.compiler_problem(whole, os.environ) == ""
    assert gpus.compiler_problem(bare, os.environ) == f"{tmp_path}/include/Python.h missing"
    *_, kernels = doctor.check_gpu(bare)
    assert kernels.state == "broken" and kernels.cure == "apt install gcc python3-dev"


def test_check_stops_at_an_engine_python_that_cannot_compile_kernels(shown: Path, tmp_path: Path) -> None:
    """vLLM's server would end at its first LoRA kernel. The embedded engine and torch learner work without."""
    bare = tmp_path / "bare"
    program(bare, f"echo {tmp_path}/include")
    program(shown / "gcc", "")
    loaded = load_config(LETTERS / "config.yaml", ["engine=vllm", f"engine.python={bare}"])
    *_, last = Preflight(loaded, tmp_path).check()
    assert (last.name, last.is_good) == ("kernels", False) and f"{tmp_path}/include/Python.h missing" in last.message
    loaded = load_config(LETTERS / "config.yaml", ["engine=embedded", "learner=torch"])
    (shown / "gcc").unlink()
    found = dict(enumerate(islice(Preflight(loaded, tmp_path).check(), 3)))
    assert [each.name for each in found.values()] == ["gpu", "kernels", "auto"]
    assert found[1].is_good and "a C compiler" in found[1].message and found[1].cure


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("here"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL Error 1: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_runs_out_in_the_words_of_each_library(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
