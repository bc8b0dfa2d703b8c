"""Files that start `art backend` on other machines: text only, which the user reads and hands to their own tool.

Each module has a function `write(server: Server) -> str`. A key never stands in a file; it comes from the tool's
secrets. Texts of users are written by the format's own quoting: YAML's, the shell's or Python's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import NamedTuple

import yaml

from art_cli.runtime.errors import UsageError

KINDS = {"skypilot": "skypilot", "kubernetes": "kubernetes", "slurm": "slurm", "modal": "modal_app"}  # name -> module
NAME = "art-backend"  # name of the job, the deployment, the secret and the volume
MOUNT = "/checkpoints"  # where the bucket or the volume is mounted
GPU = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9-]{0,40})(?::(?P<number>[1-9][0-9]?))?", re.ASCII)
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{0,254}", re.ASCII)  # a reference to an image of a container registry
LOAD_S = 3600  # longest time for downloading and loading the base model before the server is ready


class Gpu(NamedTuple):
    """Example: Gpu("H100", 2) of "H100:2"."""

    name: str
    number: int


@dataclass(frozen=True)
class Server:
    """What is to be started. Example: Server(("--base", "Qwen/Qwen3-8B", "--models", "4"), ...)"""

    options: tuple[str, ...]  # options as given, without those that follow
    config: str | None  # the sections of a configuration file as YAML; `options` do not name that file
    checkpoints: str | None  # None: as the kind of machine has it
    host: str
    port: int
    key_file: str | None  # has several keys, one a line; None: there is one key
    gpu: Gpu
    image: str | None  # None: built or installed from the directory that the command is called in
    drain_s: float

    @property
    def secret(self) -> str:
        """The name of the secret that has the key, or the lines of the key file."""
        return "ART_API_KEY" if self.key_file is None else "ART_API_KEYS"

    def command(self, *, checkpoints: str, config: str | None = None, keys: str | None = None) -> list[str]:
        """The command line. `config` and `keys` are the paths of those files on the machine."""
        given = [config] if self.config is not None and config is not None else []
        file = ["--api-key-file", keys] if self.key_file is not None and keys is not None else []
        where = ["--host", self.host, "--port", str(self.port), "--checkpoints", checkpoints]
        return ["art", "backend", *given, *self.options, *where, *file]


def writer(kind: str) -> Callable[[Server], str]:
    """Raises UsageError: no such kind of machine."""
    if kind not in KINDS:
        raise UsageError(f"--print {kind}: one of {', '.join(KINDS)}")
    write: Callable[[Server], str] = import_module(f"{__name__}.{KINDS[kind]}").write
    return write


def parse_gpu(text: str) -> Gpu:
    """Raises UsageError: not a GPU's name and a number of them."""
    found = GPU.fullmatch(text)
    if found is None:
        raise UsageError(f"--gpu {text}: expected a GPU's name and how many, for example H100:2")
    return Gpu(found["name"], int(found["number"] or 1))


def check_image(text: str | None) -> None:
    """Raises UsageError: not the reference of an image."""
    if text is not None and not IMAGE.fullmatch(text):
        raise UsageError(f"--image {text}: expected the name of an image, for example ghcr.io/me/art:1")


def check_printable(texts: tuple[str, ...]) -> None:
    """Raises UsageError: a line break or control character, which a file's line could not hold."""
    for text in texts:
        if not text.isprintable():
            raise UsageError(f"--print: {text!r} has a line break or control character")


def mount_of(server: Server) -> str:
    """The directory of the checkpoints inside a container. Raises UsageError: not an absolute path."""
    if server.checkpoints is None:
        return MOUNT
    path = PurePosixPath(server.checkpoints)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or ":" in server.checkpoints:
        raise UsageError(
            f"--checkpoints {server.checkpoints}: the volume is mounted there, so an absolute path: {MOUNT}"
        )
    return str(path)


def dump(*documents: object) -> str:
    """The documents as YAML. Texts of several lines are blocks."""
    texts = [
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True, default_flow_style=False)
        for each in documents
    ]
    return "---\n".join(texts)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
