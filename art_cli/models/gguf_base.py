"""GGUF files as base models: converted once into a directory of safetensors, which is loaded like any other base.

transformers reads the file and dequantizes it. The weights are written in float32, because 4-bit weights have no exact
16-bit form; `model.dtype` rounds them once as they are loaded. Nothing here is imported at the top that costs time.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_cli.runtime.errors import UsageError, one_line


def convert(file: Path, directory: Path) -> None:
    """Writes the model, tokenizer and chat template of a GGUF file into the directory, as transformers saves them.

    Raises UsageError: the package gguf is missing, or transformers cannot read the file.
    """
    if find_spec("gguf") is None:
        raise UsageError(f"{file.name}: reading a GGUF file needs the package gguf: pip install 'art-cli[gguf]'")
    try:
        _convert(file, directory)
    except UsageError:
        raise
    except Exception as error:  # the boundary to transformers and gguf, which raise any error at a damaged file
        raise UsageError(f"{file}: transformers cannot read this GGUF file: {one_line(error)}") from error


def _convert(file: Path, directory: Path) -> None:
    """save_pretrained refuses a model that came from a GGUF file, so its tensors are moved into a new one."""
    import torch
    import transformers

    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto: Any = transformers.AutoModelForCausalLM  # untyped there
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
