"""The torch device of a configuration, and the settings of its memory allocator."""

import os
from typing import Any

from art_cli.runtime import gpus
from art_cli.runtime.errors import UsageError


def pick_device(device: str, named: str = "learner.device") -> str:
    """Returns the device that a configuration means. Example: "cuda" for "auto" where torch sees a GPU, else "cpu".

    Raises UsageError: this machine, or this torch, does not have it.
    """
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        if problem := idle_gpu():
            raise UsageError(f"{problem}; or set {named}=cpu, or CUDA_VISIBLE_DEVICES= for the CPU")
        return "cpu"
    kind, _, index = device.partition(":")
    try:
        if kind == "cuda":
            is_there = int(index or 0) < torch.cuda.device_count()  # counting takes no memory of the GPU
        else:
            is_there = torch.empty(0, device=device) is not None
    except (RuntimeError, AssertionError, ImportError):
        is_there = False
    if not is_there:
        raise UsageError(
            f"{named}: torch {torch.__version__} finds no {device} on this machine; set it to auto, or cpu"
        )
    return device


def idle_gpu() -> str:
    """Returns why torch does not use the NVIDIA GPU of this machine, with the cure, or "" if it has none or uses it."""
    import torch

    if torch.cuda.is_available() or not gpus.has_nvidia(os.environ):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it counts no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    return gpus.idle_gpu(torch.__version__, torch.version.cuda, reason, gpus.driver())


def grow_segments() -> None:
    """Lets a GPU's blocks of memory grow, so that few are left between them when a step has freed its own.

    It is set in this process and not by PYTORCH_ALLOC_CONF, because vLLM, a child that inherits the environment,
    captures graphs that do not take such blocks. A user's own settings in the environment are left as they are.
    """
    import torch

    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        older: Any = torch.cuda.memory._set_allocator_settings  # in torch 2.9
        getattr(torch._C, "_accelerator_setAllocatorSettings", older)("expandable_segments:True")
