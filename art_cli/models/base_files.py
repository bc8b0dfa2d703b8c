"""Checks the files in a base model's directory before any library reads them; no torch.

Bases built by `art` have hashes.json, so every file is hashed each time the base is loaded. In a user's own directory,
the JSON files, weight headers and chat template are parsed, so errors name the damaged file. Pickles are never read.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from art_cli.runs.durable import read_object
from art_cli.runs.manifest import HASHES, hash_files, verify_built
from art_cli.runtime.errors import ArtError, CheckpointError, DataError, UsageError, one_line, printable

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TEMPLATE = "chat_template.jinja"
BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")
USED_SUFFIXES = (".json", ".jinja", ".model", ".safetensors")


def gguf_files(path: Path) -> list[Path]:
    """Returns the GGUF file at this path, or the GGUF files in a directory without config.json."""
    if path.is_dir():
        return [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    return [path] if path.suffix == ".gguf" and path.is_file() else []


def gguf_problem(path: Path) -> str | None:
    """Returns an error if the path is a GGUF file, for commands that need a directory or hub id."""
    found = gguf_files(path)
    if not found:
        return None
    return (
        f"{found[0]}: a GGUF file, which is converted where model.base or --base names it; here name the safetensors "
        "model that it was made from"
    )


def check_base(directory: Path, named: str | None = None) -> None:
    """Raises CheckpointError for a damaged file in a base built by `art`, UsageError in any other base.

    `named` is the user's name for the base, as in "--base 'x'".
    """
    if os.path.lexists(directory / HASHES):
        try:
            verify_built(directory)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove {directory}: the next `art train` builds it again") from error
        return
    try:
        check_files(directory)
    except ArtError as error:
        raise UsageError(f"{named or 'model.base'}: {error}; restore the file or name another model") from error


def check_files(directory: Path) -> None:
    """Raises ArtError for any file whose content does not match its name."""
    config = read_object(directory / "config.json")
    for name in JSON_FILES:
        if os.path.lexists(directory / name):
            read_object(directory / name)
    _check_depth(directory, config, [name for path in _weight_files(directory) for name in _tensor_names(path)])
    if os.path.lexists(directory / TEMPLATE):
        read_template(directory / TEMPLATE)


def read_template(path: Path) -> str:
    """Returns the text of a Jinja chat template. Raises DataError if it cannot be read or does not compile."""
    import jinja2

    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        # transformers' extra tag around assistant text is not Jinja
        plain = re.sub(r"\{%-? (?:end)?generation -?%\}", "", text)
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).compile(plain)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path) from error
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"not a Jinja template: {one_line(error)}", path, error.lineno) from error
    except (ValueError, RecursionError, SyntaxError, MemoryError) as error:
        raise DataError(f"not a Jinja template: {one_line(error)}", path) from error
    return text


def _weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files with the model. Raises DataError if they are missing or the index is damaged."""
    if os.path.lexists(directory / SINGLE):
        return [directory / SINGLE]
    if os.path.lexists(directory / INDEX):
        parts = read_object(directory / INDEX).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise DataError("no weight_map of names to files", directory / INDEX)
        return [directory / Path(part).name for part in sorted(set(parts.values()))]
    refuse_pickles(directory)
    raise DataError(f"no {SINGLE} there", directory)


def refuse_pickles(directory: Path) -> None:
    """Raises DataError if the directory has pickled weights, because unpickling runs code."""
    found = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if found:
        raise DataError("a pickle, which is never read; convert it to safetensors", directory / found[0])


def _tensor_names(path: Path) -> list[str]:
    """Returns the tensors' names in a safetensors file. Raises DataError if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise DataError("no such file", path)
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"not a whole safetensors file: {one_line(error)}", path) from error


def _check_depth(directory: Path, config: dict[str, Any], tensors: list[str]) -> None:
    """Raises DataError if there are more layers than tensors. Libraries would spend hours creating these layers."""
    num_layers = config.get("num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > len(tensors):
        shown = json.dumps(num_layers) if num_layers < 2**63 else "far too many"
        raise DataError(
            f"num_hidden_layers is {shown}; the weights have {len(tensors)} tensors", directory / "config.json"
        )


def find_files(base: str) -> Path:
    """Returns the directory with the base's files, downloading a hub id if necessary."""
    if Path(base).is_dir():
        return Path(base)
    if (cached := _cached(base)) and ((cached / SINGLE).exists() or (cached / INDEX).exists()):
        return cached
    import huggingface_hub

    try:
        wanted = [*BASE_FILES, TEMPLATE, "*.safetensors", INDEX, "generation_config.json", "vocab.json", "merges.txt"]
        return Path(huggingface_hub.snapshot_download(base, allow_patterns=wanted))
    except Exception as error:  # the boundary to the hub's client
        raise UsageError(f"model.base: {base}: {printable(error, limit=300)}") from error


def _cached(base: str) -> Path | None:
    """Returns the hub cache's directory for a hub id."""
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(base, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def base_digest(base: str) -> str:
    """Returns the sha256 over all base model files that affect replies; the hub id itself if it is not cached."""
    directory = Path(base) if Path(base).is_dir() else _cached(base)
    if directory is None:
        return base
    is_built = (directory / HASHES).is_file()
    files = read_object(directory / HASHES)["files"] if is_built else hash_files(directory)
    used = {name: digest for name, digest in files.items() if Path(name).suffix in USED_SUFFIXES}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()
