"""The memory of the device that holds a policy's weights: its size, and the peak since it was last reset."""

from contextlib import suppress
from pathlib import Path

from art_cli.models.weights import Weights
from art_cli.runtime.allocator import memory_size


def memory_there(weights: Weights) -> float:
    """Returns the gigabytes of the GPU that holds the weights, or those that this process may use."""
    if weights.device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(weights.device).total_memory / 1e9
    return memory_size() / 1e9


def forget_peak(weights: Weights) -> None:
    if weights.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(weights.device)
    else:
        with suppress(OSError):  # only Linux has it
            Path("/proc/self/clear_refs").write_text("5")


def peak(weights: Weights) -> float | None:
    if weights.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(weights.device) / 1e9
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e6
