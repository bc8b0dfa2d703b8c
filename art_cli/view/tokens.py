"""The tokenizer that wrote a run's tokens, and each token as text. Reads tokenizer.json; no torch, no network.

It is looked for in the run's newest checkpoint, in its base, in the base that config.json names, and in the cache of
the Hugging Face hub.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_cli.runs.durable import read_object
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError

FILE = "tokenizer.json"
MAX_FILE = 256 * 2**20  # bytes of a tokenizer; that of a vocabulary of 262,000 tokens has 33 MB


class TokenTexts:
    """Token ids as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream: Any = importlib.import_module("tokenizers.decoders").DecodeStream

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds.

        A token that ends amid a character adds none; the one that ends it adds it.
        """
        found: list[str] = []
        stream = self._stream(skip_special_tokens=False)
        for id in ids:
            try:
                is_known = self._tokenizer.id_to_token(id) is not None
                piece = stream.step(self._tokenizer, id) if is_known else f"<{id}>"
            except Exception:  # the boundary to the tokenizer: a number that is no id, or bytes that are no text
                stream = self._stream(skip_special_tokens=False)
                piece = f"<{id}>"
            found.append(piece or "")
        return found


def find_tokenizer(run: RunDir | None) -> TokenTexts | None:
    """It is None if no tokenizer can be found or read, or `tokenizers` is not installed."""
    if run is None:
        return None
    for path in _places(run):
        if path.is_file() and path.stat().st_size <= MAX_FILE and (texts := _load(path)) is not None:
            return texts
    return None


def _load(path: Path) -> TokenTexts | None:
    try:
        tokenizers = importlib.import_module("tokenizers")
        return TokenTexts(tokenizers.Tokenizer.from_file(str(path)))
    except Exception:  # not installed, or the boundary to tokenizers, which raises plain Exceptions
        return None


def _places(run: RunDir) -> Iterator[Path]:
    for step in reversed(run.checkpoint_steps()):
        yield run.checkpoint_path(step) / FILE
    yield run.base / FILE
    base = _base(run)
    if not base:
        return
    yield Path(base).expanduser() / FILE
    yield from _cached(base)


def _base(run: RunDir) -> str:
    """Returns the base in config.json, or ""."""
    try:
        section = read_object(run.config_path, within=run.root).get("model")
    except ArtError:
        return ""
    base = section.get("base") if isinstance(section, Mapping) else None
    return base if isinstance(base, str) else ""


def _cached(base: str) -> Iterator[Path]:
    """Yields the files of a hub's model in the local cache, as huggingface_hub lays it out."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if base.count("/") == 1 and ".." not in base:
        yield from sorted((cache / f"models--{base.replace('/', '--')}" / "snapshots").glob(f"*/{FILE}"))
