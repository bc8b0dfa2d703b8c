"""Chooses for `engine: auto`: vLLM if there is a GPU and vLLM can serve the model; otherwise embedded.

    Machine -> choose_engine -> AutoChoice

A run resumed on the same machine gets the same engine. Importing this module is cheap: vLLM is tried elsewhere.
"""

import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.schema import ModelConfig
from art_cli.engines.vllm.arguments import LORA_RANKS, ONLY_16_BITS, VllmFacts, find_vllm, has_gpu, visible_gpus
from art_cli.models.precision import gpu_bytes

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0  # longest wait for a model's architecture from the hub


class AutoChoice(NamedTuple):
    """Example: AutoChoice("embedded", "vLLM is not installed", "pip install 'art-cli[vllm]'")."""

    name: str
    reason: str
    cure: str = ""  # advice for getting vLLM, or ""
    is_broken: bool = False  # True if vLLM is installed but cannot work


class Machine:
    """Hardware and packages of this machine, looked up on each call."""

    def has_gpu(self) -> bool:
        return has_gpu(os.environ)

    def num_gpus(self) -> int:
        return len(visible_gpus(os.environ)) if self.has_gpu() else 0

    def has(self, module: str) -> bool:
        """Returns True if this Python has the module; it is not imported."""
        return find_spec(module) is not None

    def gpu_bytes(self, device: str) -> float:
        """Returns a GPU's total bytes; 0 without a GPU."""
        return gpu_bytes(device)

    def vllm(self, python: Path | None) -> VllmFacts:
        """Returns facts about the Python's vLLM. Importing vLLM takes seconds to a minute."""
        return find_vllm(python)


def choose_engine(
    machine: Machine,
    *,
    obstacle: str = "",
    base: str | None = None,
    python: Path | None = None,
    quantize: str | None = None,
) -> AutoChoice:
    """Returns vLLM if the vLLM in `python` (by default this Python) can serve `base` here, otherwise embedded.

    `obstacle` is a reason against vLLM for this run. vLLM is imported only as a last resort.
    """
    if not machine.has_gpu() or obstacle:
        return AutoChoice("embedded", obstacle if machine.has_gpu() else "no GPU here")
    cure = "pip install 'art-cli[vllm]'"
    if python is None and not machine.has("vllm"):
        return AutoChoice("embedded", "vLLM is not installed", cure)
    vllm = machine.vllm(python)
    if vllm.version is None:
        return AutoChoice("embedded", f"vLLM does not work in {vllm.python}: {vllm.error}", cure, is_broken=True)
    if not vllm.gpus:
        reason, cure = f"torch {vllm.torch} of {vllm.python} sees no GPU", "install a build of torch for this GPU"
        return AutoChoice("embedded", reason, cure, is_broken=True)
    if not vllm.has_bfloat16:
        return AutoChoice("embedded", f"the GPU has no bfloat16, and {ONLY_16_BITS}")
    if problem := vllm.lacks(quantize):
        return AutoChoice("embedded", problem, vllm.plugin_cure, is_broken=True)
    if unknown := [name for name in _architectures(base) if name not in vllm.architectures]:
        return AutoChoice("embedded", f"vLLM {vllm.version} does not serve {unknown[0]}")
    return AutoChoice("vllm", f"vLLM {vllm.version} and a GPU are here")


def vllm_obstacle(model: ModelConfig, directory: Path) -> str:
    """Returns the reason why vLLM cannot follow this model's training, or ""."""
    if model.lora is None:
        return "model.lora is null, and vLLM swaps LoRA adapters only"
    if model.lora.rank > LORA_RANKS[-1]:
        return f"model.lora.rank is {model.lora.rank}, and vLLM serves {LORA_RANKS[-1]} at most"
    if model.dtype == "float32":
        return f"model.dtype is float32, and {ONLY_16_BITS}"
    if is_built(model.base, directory):
        return "model.base is made by a function, and vLLM knows published architectures only"
    return ""


def is_built(base: str, directory: Path) -> bool:
    """Returns True if `model.base` is "file.py:function"."""
    return ":" in base and not (directory / base).is_dir()


def _architectures(base: str | None) -> list[str]:
    """Returns the architectures in the base's config.json, such as ["Qwen3ForCausalLM"]; [] if unreadable."""
    found = None if base is None else _base_config(base)
    names = found.get("architectures") if isinstance(found, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _base_config(base: str) -> Any:
    """Returns config.json of a directory or hub id, from the hub's cache or by a short request."""
    import huggingface_hub

    file = Path(base) / "config.json"
    try:
        cached = file if Path(base).is_dir() else huggingface_hub.try_to_load_from_cache(base, "config.json")
        if isinstance(cached, str | Path):
            return json.loads(Path(cached).read_text())
        return huggingface_hub.HfApi().model_info(base, timeout=HUB_TIMEOUT_S).config
    except Exception as error:  # boundary to the hub's client; loading the model reports the error
        log.debug("%s: its architecture is not known: %s", base, error)
        return None
