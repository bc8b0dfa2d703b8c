"""RemoteCheckpoint: remote.json in a checkpoint directory, with the server's paths to the weights.

The directory has the usual manifest and is verified like any checkpoint. Serving and exporting need the weights
locally: `fetched` downloads the adapter once into a separate checkpoint.
"""

import io
import logging
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from art_cli.runs.durable import newer_schema, write_file
from art_cli.runs.manifest import MANIFEST, Manifest, new_checkpoint, verify_checkpoint
from art_cli.runs.run_checkpoints import REMOTE_FILE
from art_cli.runs.trajectory import SCHEMA_VERSION
from art_cli.runtime.errors import CheckpointError, RemoteError, one_line

if TYPE_CHECKING:
    from art_cli.tinker.client.remote_server import RemoteServer

log = logging.getLogger(__name__)

URL_VARIABLE, KEY_VARIABLE = "TINKER_BASE_URL", "TINKER_API_KEY"
LEASE_FILE = ".adapter.json"
HOME = ".fetched"  # directory for downloads, inside a run's checkpoints/
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
WHOLE_FILES = ("config.json", "model.safetensors")  # files from a server that trains all weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
TEMPLATE_FILE = "chat_template.jinja"
DOWNLOAD_S = 600.0  # timeout per part of a download
MAX_ARCHIVE = 64 * 2**30
# SkyRL's paths for sampler weights lack the kind: tinker://RUN/NAME
_PATH = re.compile(r"tinker://[\w.:-]{1,200}(/[\w.-]{1,100})?/[\w.:-]{1,200}", re.ASCII)
_PART = 2**20


class RemoteCheckpoint(msgspec.Struct, kw_only=True):
    """remote.json. Example: RemoteCheckpoint(url="http://gpu:8100", base_model="Qwen/Qwen3-8B",
    state="tinker://s1:train:0/weights/a1", sampler="tinker://s1:train:0/sampler_weights/a1", num_steps=4)
    """

    schema_version: int = SCHEMA_VERSION
    url: str
    base_model: str  # the server's name for it
    state: str  # adapter and optimizer, for further training
    sampler: str  # the same adapter, for sampling and downloading
    num_steps: int = 0  # policy steps that changed weights; the learning rate's warm-up counts these
    num_updates: int = 0  # optimizer steps
    norms: tuple[float, ...] = ()  # recent gradient norms before clipping, newest last
    api_key_env: str = KEY_VARIABLE  # environment variable with the server's key

    def __post_init__(self) -> None:
        for path in (self.state, self.sampler):
            if not _PATH.fullmatch(path):
                raise ValueError(f"{path[:200]!r} is not a path of the Tinker protocol")


def read_remote(directory: Path) -> RemoteCheckpoint:
    """Reads remote.json. Raises CheckpointError if the file is missing or invalid."""
    try:
        found = msgspec.json.decode((directory / REMOTE_FILE).read_bytes(), type=RemoteCheckpoint)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory}: its weights are here and not on a server (no {REMOTE_FILE}); continue with the learner that "
            "made it, or begin a new run"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory}: {REMOTE_FILE} cannot be read: {one_line(error)}") from None
    if found.schema_version > SCHEMA_VERSION:
        raise CheckpointError(f"{directory}: {REMOTE_FILE}: {newer_schema(found.schema_version)}")
    return found


def write_remote(directory: Path, remote: RemoteCheckpoint) -> None:
    (directory / REMOTE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(remote)))


class _Lease(msgspec.Struct, frozen=True):
    """A run's adapter in training, recorded in the run's checkpoints/ and never copied."""

    url: str
    model_id: str


def write_lease(checkpoints: Path, url: str, model_id: str) -> None:
    """Records which adapter the run trains, so that a later process can unload it after a kill."""
    if checkpoints.name == "checkpoints":
        write_file(checkpoints / LEASE_FILE, msgspec.json.encode(_Lease(url, model_id)))


def read_lease(checkpoints: Path, url: str) -> str | None:
    """Returns the id of the adapter that a previous process trained on this server."""
    try:
        lease = msgspec.json.decode((checkpoints / LEASE_FILE).read_bytes(), type=_Lease)
    except (OSError, ValueError, RecursionError):
        return None  # the server unloads the adapter when the session expires
    return lease.model_id if lease.url == url else None


def fetched(directory: Path) -> Path:
    """Returns the directory with the downloaded adapter. Raises RemoteError, and CheckpointError for other files."""
    place = directory.parent / HOME / directory.name
    remote, manifest = read_remote(directory), verify_checkpoint(directory)
    if (place / MANIFEST).is_file():
        try:
            if verify_checkpoint(place).config_hash == remote.sampler:
                return place
        except CheckpointError as error:
            log.warning("downloaded again: %s", error)
    server = _server_of(directory, remote)
    log.info("%s: downloading the adapter from %s", directory, server.url)
    base = directory / manifest.base
    kept = Manifest(
        step=manifest.step,
        base=str(base.resolve()) if base.is_dir() else manifest.base,
        config_hash=remote.sampler,  # identifies the download; fetched checkpoints are never trained
        dtype=manifest.dtype,
    )
    with new_checkpoint(place, kept) as made:
        _download(server, remote.sampler, made)
        if (directory / TEMPLATE_FILE).is_file():
            shutil.copy(directory / TEMPLATE_FILE, made / TEMPLATE_FILE)
    return place


def _server_of(directory: Path, remote: RemoteCheckpoint) -> "RemoteServer":
    """Returns the download server. A checkpoint may come from a stranger, so keys go only to servers chosen by the
    user.

    The checkpoint names the key's environment variable. Its value is sent only if it looks like a Tinker key.
    """
    from art_cli.tinker.client.remote_server import is_local, server_at  # runs without a server do not load aiohttp

    named = os.environ.get(URL_VARIABLE, "")
    if not named and not is_local(remote.url):
        raise RemoteError(
            f"{directory}: its weights are at {remote.url}: set {URL_VARIABLE}={remote.url} and {remote.api_key_env} "
            "to download them from there"
        )
    return server_at(named or remote.url, remote.api_key_env)


def reachable(location: str, url: str) -> str:
    """Returns an address as this client reaches it: behind a proxy, the server does not know about https."""
    there, ours = urlsplit(location), urlsplit(url)
    is_same = there.hostname == ours.hostname
    return there._replace(scheme=ours.scheme, netloc=ours.netloc).geturl() if is_same else location


def _download(server: "RemoteServer", path: str, directory: Path) -> None:
    """Downloads the adapter's files. Raises RemoteError, CheckpointError."""
    import httpx

    from art_cli.tinker.client.remote_server import is_local

    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    at = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    archive = directory / ".archive.tmp"
    try:
        with httpx.Client(timeout=DOWNLOAD_S, trust_env=not is_local(server.url)) as client:
            answer = client.get(at, headers={"X-API-Key": server.key})
            if answer.status_code in (401, 403):
                raise RemoteError(server.refused_key())
            location = answer.headers.get("location")
            if answer.status_code == 404 or location is None:
                raise RemoteError(f"{server.url}: it has no {path} (status {answer.status_code})")
            with (
                client.stream("GET", reachable(location, server.url), follow_redirects=False) as content,
                archive.open("wb") as file,
            ):
                if content.status_code != 200:
                    raise RemoteError(f"{server.url}: the download of {path} failed with status {content.status_code}")
                for part in content.iter_bytes(_PART):
                    file.write(part)
                    if file.tell() > MAX_ARCHIVE:
                        raise RemoteError(f"{server.url}: {path} is larger than {MAX_ARCHIVE >> 30} GiB")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RemoteError(f"{server.url}: the download of {path} broke off: {one_line(error)}") from None
    with archive.open("rb") as file:
        _unpack(file, path, directory)
    archive.unlink()
    name_targets(directory)


def name_targets(directory: Path) -> None:
    """Adds missing layer names to the adapter's configuration (SkyRL omits them). Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    config, tensors = (directory / name for name in ADAPTER_FILES)
    if not config.is_file():
        return  # a complete model
    try:
        fields = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
        if fields.get("target_modules") is not None:
            return
        with safe_open(tensors, "np") as file:
            layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    except (ValueError, RecursionError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: the server's files are not an adapter: {one_line(error)}") from None
    config.write_bytes(msgspec.json.encode({**fields, "target_modules": sorted(layers)}))


def _unpack(file: IO[bytes] | io.BytesIO, path: str, directory: Path) -> None:
    """Extracts the files of an adapter, or of a complete model with tokenizer, from a tar file. Ignores other files."""
    taken = (*ADAPTER_FILES, *WHOLE_FILES, *TOKENIZER_FILES)
    try:
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member) if member.isreg() and name in taken else None
                if content is not None:
                    with (directory / name).open("wb") as target:
                        shutil.copyfileobj(content, target)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: the server did not send an archive: {one_line(error)}") from None
    wanted = WHOLE_FILES if (directory / WHOLE_FILES[1]).is_file() else ADAPTER_FILES
    if missing := [name for name in wanted if not (directory / name).is_file()]:
        raise CheckpointError(f"{path}: the server's archive has no {missing[0]}")
    # prompts for an adapter use the base model's tokenizer
    for name in TOKENIZER_FILES if wanted == ADAPTER_FILES else ():
        (directory / name).unlink(missing_ok=True)
