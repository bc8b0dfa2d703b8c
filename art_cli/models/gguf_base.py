"""GGUF files as base models: converted once into a directory of safetensors, which is loaded like any other base.

    model.gguf, or a directory with one such file and no config.json       a file on this machine
    owner/name:model.gguf                                                  a file in a repository on the hub

transformers reads the file and dequantizes it. The weights are written in float32, because 4-bit weights have no exact
16-bit form; `model.dtype` rounds them once at load time. The header is checked against the file size beforehand, so its
numbers cannot make a library allocate more than the file can fill.
"""

import contextlib
import hashlib
import io
import logging
import math
import mmap
import re
import struct
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_cli.models.base_cache import take_or_make
from art_cli.models.base_files import gguf_files
from art_cli.runs.manifest import hash_file
from art_cli.runtime.errors import UsageError, one_line

log = logging.getLogger(__name__)

HUB_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+):(?P<file>[\w][\w./+-]*\.gguf)", re.ASCII)
HUB_TIMEOUT_S = 10.0
MAGIC, VERSIONS = b"GGUF", (2, 3)
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by value type
WIDTHS = {kind: struct.calcsize(f"<{form}") for kind, form in FORMS.items()}  # bytes per value
STRING, ARRAY = 8, 9  # value types without a fixed width
MAX_DIMENSIONS = 4  # ggml's limit
MIN_TENSORS = 4  # per layer; the library creates all layers named in the header before looking for their tensors


def builder_of(base: str, directory: Path) -> Callable[[Path], None] | None:
    """Returns a function that writes the model if `base` names a GGUF file.

    Paths are relative to `directory`. Raises UsageError for a directory with several GGUF files.
    """
    if HUB_FILE.fullmatch(base) and not (directory / base).exists():
        return lambda empty: convert(_download(base), empty)
    file = the_file(directory / base)
    return partial(convert, file) if file is not None else None


def the_file(path: Path) -> Path | None:
    """Returns the GGUF file at a path, if any. Raises UsageError for a directory with several."""
    found = gguf_files(path)
    if len(found) > 1:
        raise UsageError(f"{path}: {len(found)} GGUF files; name one of them, such as {found[0].name}")
    return found[0] if found else None


def _download(base: str) -> Path:
    import huggingface_hub

    named = HUB_FILE.fullmatch(base)
    assert named is not None, base
    try:
        found = huggingface_hub.hf_hub_download(named["repo"], named["file"], etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the boundary to the hub's client, which raises arbitrary transport errors
        raise UsageError(f"{base}: the hub could not give this file: {one_line(error)[:200]}") from error
    return Path(found)


def convert(file: Path, directory: Path) -> None:
    """Writes a GGUF file's model, tokenizer and chat template into the directory, in transformers' format.

    Raises UsageError if the package gguf is missing, the file is damaged or transformers cannot load the architecture.
    """
    num_elements = check_header(file)
    try:
        take_or_make(_key(file), directory, lambda empty: _convert(file, empty, num_elements))
    except UsageError:
        raise
    except Exception as error:  # the boundary to transformers and gguf, which raise arbitrary errors on damaged files
        raise UsageError(f"{file}: transformers cannot read this GGUF file: {one_line(error)}") from error


def _key(file: Path) -> str:
    """Returns a digest over all inputs to the conversion: the GGUF file, this module, the libraries."""
    parts = [hash_file(file), hash_file(Path(__file__)), version("transformers"), version("gguf")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _convert(file: Path, directory: Path, num_elements: int) -> None:
    """Moves the tensors into a new model, because save_pretrained rejects models loaded from GGUF."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    log.info("converting %s to safetensors", file)
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    auto: Any = transformers.AutoModelForCausalLM  # untyped there
    config = transformers.AutoConfig.from_pretrained(file.parent, **source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    if model.num_parameters() > num_elements:
        raise UsageError(
            f"{file}: its header describes a model of {model.num_parameters()} parameters, and its tensors have "
            f"{num_elements}"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
    loading: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    with contextlib.redirect_stderr(io.StringIO()):  # in a log, its progress bar would write one line per tensor
        loaded, found = auto.from_pretrained(file.parent, **loading, **source)
    if missing := sorted(found.get("missing_keys") or ()):
        raise UsageError(f"{file}: {len(missing)} of the model's tensors are missing, first {missing[0]}")
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def check_header(file: Path) -> int:
    """Returns the total number of tensor elements, after checking every count in the header against the file size.

    Raises UsageError if this is not a GGUF file, it is truncated or damaged, or the package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise UsageError(f"{file}: reading a GGUF file needs the package gguf: pip install 'art-cli[gguf]'")
    try:
        with file.open("rb") as opened:
            if opened.read(4) != MAGIC:
                raise UsageError(f"{file}: not a GGUF file, which begins with GGUF")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).check()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from error
    except _Scaled:
        raise UsageError(
            f"{file}: its rotary embedding is scaled, which transformers leaves out of a GGUF file, and so it would be "
            "another model; name it as safetensors"
        ) from None
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"{file}: a damaged GGUF file: {one_line(error)}") from error


class _Scaled(Exception):
    """transformers would ignore the model's rope scaling."""


class _Header:
    """Parses a GGUF header. Numbers pointing past the end of the file raise ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def check(self) -> int:
        version, num_tensors, num_values = self._unpack("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, and 2 and 3 are known")
        self._fit(num_tensors, 24, "tensors")  # bytes of the shortest entry
        self._fit(num_values, 13, "values")
        alignment = 32
        for _ in range(num_values):
            key = self._string()
            kind = self._unpack("I")[0]
            if key.endswith(b".rope.scaling.type") and not key.startswith(b"gpt-oss.") and kind == STRING:
                at = self.at
                if self._string() not in (b"none", b""):
                    raise _Scaled
                self.at = at
            value = self._value(kind)
            if key == b"general.alignment":
                alignment = int(value)
            if key.endswith(b"block_count") and not 0 <= value * MIN_TENSORS <= num_tensors:
                raise ValueError(f"{value} layers, and {num_tensors} tensors")
        if not 0 < alignment <= len(self.data):
            raise ValueError(f"an alignment of {alignment}")
        tensors = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self.at // alignment) * alignment
        if (end := begin + max((start + size for _, size, start in tensors), default=0)) > len(self.data):
            raise ValueError(f"cut off: a tensor ends at byte {end}")
        if sum(size for _, size, _ in tensors) > len(self.data):
            raise ValueError("its tensors overlap")
        return sum(elements for elements, _, _ in tensors)

    def _tensor(self) -> tuple[int, int, int]:
        """Returns the tensor's number of elements, its bytes, and its offset in the data section."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._string().startswith((b"rope_freqs.weight", b"rope_factors_")):
            raise _Scaled
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {num_dimensions} dimensions")
        shape = self._unpack("Q" * num_dimensions)
        kind, start = self._unpack("IQ")
        num_elements = math.prod(shape)
        of_block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return num_elements, -(-num_elements // of_block) * bytes_of_block, start

    def _value(self, kind: int) -> float:
        """Skips a value. Returns a number, 0 for a string, infinity for an array."""
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            element, num = self._unpack("IQ")
            self._fit(num, 8 if element == STRING else WIDTHS[element], "elements")
            if element == STRING:
                for _ in range(num):
                    self._string()
            else:
                self.at += num * WIDTHS[element]
            return math.inf
        else:
            return float(self._unpack(FORMS[kind])[0])
        return 0

    def _string(self) -> bytes:
        (length,) = self._unpack("Q")
        self._fit(length, 1, "characters")
        self.at += length
        return self.data[self.at - length : self.at]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def _fit(self, num: int, width: int, what: str) -> None:
        if num * width > len(self.data) - self.at:
            raise ValueError(f"cut off, or {num} {what} that it cannot hold")
