"""Checks that the files of a base model's directory are whole before any library reads them; no torch.

A base that `art` built has hashes.json, so every file is hashed each time the base is loaded. A user's own directory
has none. There the JSON files, the headers of the weights and the chat template are read, so that an error names the
damaged file. Pickles are never read.
"""

import hashlib
import json
import os
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
    """Returns the GGUF file that the path is, or those in a directory without config.json; empty if it is neither."""
    if path.is_dir():
        return [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    return [path] if path.suffix == ".gguf" and path.is_file() else []


def gguf_problem(path: Path) -> str | None:
    """Returns why a GGUF file cannot stand where only directories and hub ids can, or None if there is none."""
    found = gguf_files(path)
    if not found:
        return None
    return (
        f"{found[0]}: a GGUF file, which is converted where model.base or --base names it; here name the safetensors "
        "model that it was made from"
    )


def check_base(directory: Path, named: str | None = None) -> None:
    """Raises CheckpointError for a damaged file of a base that was built, UsageError for one of any other base.

    `named` is what the user calls the base, as in "--base 'x'".
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
    """Raises ArtError for the first file whose content cannot be what its name promises."""
    config = read_object(directory / "config.json")
    for name in JSON_FILES:
        if os.path.lexists(directory / name):
            read_object(directory / name)
    _check_depth(directory, config, [name for path in _weight_files(directory) for name in _tensor_names(path)])
    if os.path.lexists(directory / TEMPLATE):
        read_template(directory / TEMPLATE)


def read_template(path: Path) -> str:
    """Returns the text of a Jinja chat template, which compiles. Raises DataError: it does not."""
    import jinja2

    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).compile(_without_markers(text))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path) from error
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"not a Jinja template: {one_line(error)}", path, error.lineno) from error
    except (ValueError, RecursionError, SyntaxError, MemoryError) as error:
        raise DataError(f"not a Jinja template: {one_line(error)}", path) from error
    return text


def _without_markers(text: str) -> str:
    """The template without {% generation %}, the tag that transformers adds to Jinja around an assistant's text."""
    for marker in ("generation", "endgeneration"):
        for left in ("{%-", "{%"):
            for right in ("-%}", "%}"):
                text = text.replace(f"{left} {marker} {right}", "")
    return text


def _weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files that hold the model. Raises DataError: there are none, or the index is damaged."""
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
    """Raises DataError: the directory has pickled weights, which would run as a program when they were read."""
    found = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if found:
        raise DataError("a pickle, which is never read; convert it to safetensors", directory / found[0])


def _tensor_names(path: Path) -> list[str]:
    """Returns the tensors' names in a safetensors file.

    Raises DataError: no such file, or its header does not fit it.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise DataError("no such file", path)
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"not a whole safetensors file: {one_line(error)}", path) from error


def _check_depth(directory: Path, config: dict[str, Any], tensors: list[str]) -> None:
    """Raises DataError: more layers than tensors. A library would make those layers one after the other for hours."""
    num_layers = config.get("num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > len(tensors):
        shown = json.dumps(num_layers) if num_layers < 2**63 else "far too many"
        raise DataError(
            f"num_hidden_layers is {shown}; the weights have {len(tensors)} tensors", directory / "config.json"
        )


def find_files(base: str) -> Path:
    """Returns the directory of the base's files; those of a hub id are fetched if they are not there yet."""
    if Path(base).is_dir():
        return Path(base)
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(base, "config.json")
    if isinstance(cached, str) and _has_weights(Path(cached).parent):
        return Path(cached).parent
    try:
        wanted = [*BASE_FILES, TEMPLATE, "*.safetensors", INDEX, "generation_config.json", "vocab.json", "merges.txt"]
        return Path(huggingface_hub.snapshot_download(base, allow_patterns=wanted))
    except Exception as error:  # the boundary to the hub's client
        raise UsageError(f"model.base: {base}: {printable(error, limit=300)}") from error


def _has_weights(directory: Path) -> bool:
    return (directory / SINGLE).exists() or (directory / INDEX).exists()


def base_digest(base: str) -> str:
    """sha256 over the files of a base model that make its replies; the hub id itself if nothing of it is cached."""
    import huggingface_hub

    directory = Path(base)
    if not directory.is_dir():
        cached = huggingface_hub.try_to_load_from_cache(base, "config.json")
        if not isinstance(cached, str):
            return base
        directory = Path(cached).parent
    is_built = (directory / HASHES).is_file()
    files = read_object(directory / HASHES)["files"] if is_built else hash_files(directory)
    used = {name: digest for name, digest in files.items() if Path(name).suffix in USED_SUFFIXES}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()
