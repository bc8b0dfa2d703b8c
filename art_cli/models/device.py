"""The torch device named in a configuration; its memory: allocator settings, size and peak usage."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.models.weights import Weights
from art_cli.runtime import gpus
from art_cli.runtime.allocator import memory_size
from art_cli.runtime.errors import UsageError, one_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def pick_device(device: str, named: str = "learner.device") -> str:
    """Resolves a configured device. Example: "auto" becomes "cuda" if torch sees a GPU, else "cpu".

    Raises UsageError if this machine or this torch does not have the device.
    """
    import torch

    kind, _, index = device.partition(":")
    if kind in ("auto", "cuda") and (problem := idle_gpu(int(index or 0))):
        raise UsageError(f"{problem}; or set {named}=cpu, or CUDA_VISIBLE_DEVICES= for the CPU")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if kind == "cuda":
            is_there = int(index or 0) < torch.cuda.device_count()  # counting allocates no GPU memory
        else:
            is_there = torch.empty(0, device=device) is not None
    except (RuntimeError, AssertionError, ImportError):
        is_there = False
    if not is_there:
        raise UsageError(
            f"{named}: torch {torch.__version__} finds no {device} on this machine; set it to auto, or cpu"
        )
    return device


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers as float64; those on MPS, which has no float64, on the CPU."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def fitting_device(num_bytes: float) -> str:
    """Returns "auto", or "cpu" if torch's GPU has less free memory."""
    import torch

    if not torch.cuda.is_available():
        return "auto"
    free = 0
    with suppress(RuntimeError):  # without memory for CUDA itself
        torch.cuda.empty_cache()  # memory of earlier models counts as free
        free = torch.cuda.mem_get_info()[0]
    if free >= num_bytes:
        return "auto"
    log.info("computing on the CPU: %.1f GB needed, and %.1f GB free on the GPU", num_bytes / 1e9, free / 1e9)
    return "cpu"


def idle_gpu(index: int = 0) -> str:
    """Returns why torch does not use this machine's NVIDIA GPU, with a cure; "" if it is used or missing."""
    import torch

    if torch.cuda.is_available():
        with suppress(AssertionError, RuntimeError):  # of an unknown index, or a GPU that fails; its use reports them
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            return gpus.unknown_gpu(torch.__version__, name, capability, torch.cuda.get_arch_list())
        return ""
    if not gpus.has_nvidia(os.environ):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it counts no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    return gpus.idle_gpu(torch.__version__, torch.version.cuda, reason, gpus.driver())


def grow_segments(device: torch.device) -> None:
    """Makes GPU memory segments expandable, so freed memory does not leave fragments between steps.

    This is set per process instead of in PYTORCH_ALLOC_CONF, because vLLM, which inherits the environment, captures
    CUDA graphs that do not support expandable segments. User settings in the environment take precedence.

    One allocation tries the segments, because not every GPU supports them: virtual GPUs and Jetsons
    (https://github.com/unslothai/unsloth/issues/1446), and some cards under WSL with drivers before 615
    (https://github.com/pytorch/pytorch/issues/192330). There every allocation would fail.
    """
    import torch

    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    older: Any = torch.cuda.memory._set_allocator_settings  # in torch 2.9
    set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    set_allocator("expandable_segments:True")
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        set_allocator("expandable_segments:False")
        log.info("GPU memory: segments that do not grow, because of: %s", one_line(error))


def memory_there(weights: Weights) -> float:
    """Returns the memory of the weights' device in GB: of the GPU, or what this process may use."""
    if weights.device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(weights.device).total_memory / 1e9
    return memory_size() / 1e9


def forget_peak(weights: Weights) -> None:
    if weights.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(weights.device)
    else:
        with suppress(OSError):  # exists on Linux only
            Path("/proc/self/clear_refs").write_text("5")


def peak(weights: Weights) -> float | None:
    """Returns the peak memory in GB since `forget_peak`; None on a CPU outside Linux."""
    if weights.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(weights.device) / 1e9
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e6
