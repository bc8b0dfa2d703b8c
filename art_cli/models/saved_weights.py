"""Reads and writes a policy's weights in checkpoint directories: PEFT's adapters or transformers' whole models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.models.base_files import refuse_pickles
from art_cli.models.base_source import hide_progress_bars
from art_cli.models.weights import Weights
from art_cli.runtime.errors import ArtError, CheckpointError, one_line

if TYPE_CHECKING:
    import torch

ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"


def load_checkpoint(
    weights: Weights, checkpoint: Path, *, part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> None:
    """Loads a checkpoint's adapter (or whole model, if `has_adapter` is False) into `weights`.

    For models divided between processes, `part(tensor, own)` returns the section of a whole tensor that belongs in
    `own`. Raises CheckpointError if weights are missing or have different shapes.
    """
    from safetensors.torch import load_file

    path = weights_file(checkpoint, has_adapter=weights.has_adapter)
    with fitting(path):
        tensors = load_file(path)
        with weights.lock:
            _set_tensors(weights, tensors if part is None else _parts(weights, tensors, part))
            weights.version += 1


def weights_file(checkpoint: Path, *, has_adapter: bool) -> Path:
    """Returns the path of a checkpoint's weights. Raises CheckpointError if they are missing."""
    path = checkpoint / (ADAPTER_FILE if has_adapter else MODEL_FILE)
    if path.is_file():
        return path
    refuse_pickles(checkpoint)
    if (checkpoint / "remote.json").is_file():
        raise CheckpointError(f"{checkpoint}: its weights are on a server: continue with engine=tinker learner=tinker")
    raise CheckpointError(f"{checkpoint}: no {path.name}; is model.lora what it was when this was trained?")


def save_weights(weights: Weights, directory: Path, *, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Writes a plain PEFT directory (or a transformers directory, if `has_adapter` is False), including the tokenizer.

    `tensors` maps parameter names to trained tensors, by default the model's own.
    """
    with weights.lock:
        whole = {} if weights.has_adapter else {"max_shard_size": 2**60}  # always a single file
        weights.model.save_pretrained(directory, state_dict=tensors, **whole)
        weights.tokenizer.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)  # peft's empty model card
    if weights.has_adapter:
        _settle(directory / "adapter_config.json")


def save_merged(weights: Weights, directory: Path, dtype: str) -> None:
    """Writes a model in this dtype for transformers, vLLM and `art`. Converts `weights` in place."""
    import torch

    assert not weights.has_adapter, "an adapter is merged first"
    hide_progress_bars()
    with weights.lock:
        weights.model.to(getattr(torch, dtype))
        weights.model.save_pretrained(directory)
        weights.tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def fitting(place: Path) -> Iterator[None]:
    """The boundary to libraries loading a checkpoint: their errors become CheckpointErrors."""
    try:
        yield
    except ArtError:
        raise
    except Exception as error:
        raise CheckpointError(f"{place}: does not fit this model: {one_line(error)}") from error


def _parts(
    weights: Weights,
    tensors: dict[str, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns this process's part of every whole tensor; mismatched tensors are returned unchanged."""
    model = weights.model
    own: Any = model.state_dict()
    if weights.has_adapter:
        import peft

        own = peft.get_peft_model_state_dict(model)
    fits = {name for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    return {name: part(tensor, own[name]) if name in fits else tensor for name, tensor in tensors.items()}


def _set_tensors(weights: Weights, tensors: dict[str, torch.Tensor]) -> None:
    """Sets all weights, or raises an error before changing any if names or shapes do not match."""
    if weights.has_adapter:
        _set_adapter(weights.model, tensors)
        return
    own: Any = weights.model.state_dict()
    tied = set(getattr(weights.model, "_tied_weights_keys", None) or [])
    wrong = [name for name in own if name not in tied and name not in tensors]
    _refuse(wrong + [name for name, tensor in tensors.items() if name not in own or own[name].shape != tensor.shape])
    weights.model.load_state_dict(tensors, strict=False)


def _set_adapter(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Like `_set_tensors`. PEFT reports mismatches only after setting other tensors, so these are restored."""
    import peft
    import torch

    parameters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        result: Any = peft.set_peft_model_state_dict(model, tensors)
        _refuse(list(result.unexpected_keys) + [name for name in result.missing_keys if "lora_" in name])
    except BaseException:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        raise


def _refuse(wrong: Sequence[str]) -> None:
    """Raises ValueError if any tensor name is given."""
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not match, first {wrong[0]}")


def _settle(path: Path) -> None:
    """Makes equal adapters byte-identical: sorts PEFT's set of targets, removes the local path of the base."""
    config = json.loads(path.read_text())
    if isinstance(targets := config.get("target_modules"), list):
        config["target_modules"] = sorted(targets)
    if Path(config.get("base_model_name_or_path") or "").is_dir():
        config["base_model_name_or_path"] = None
    path.write_text(json.dumps(config, indent=2, sort_keys=True))
