"""The section `rollout.cluster`: a cluster of machines on which rollouts are played."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator

from art_cli.config.sections.base_config import PositiveFloat, Seconds, Section

MAX_RESOURCE = 1e6  # largest amount of one resource for one process
# What of Ray's runtime_env is set here, and where the user sets it instead.
OWN_RUNTIME_ENV = {
    "working_dir": "the config's directory is sent; rollout.cluster.exclude leaves files out",
    "excludes": "set rollout.cluster.exclude",
    "py_modules": "put modules into the config's directory, or name packages in pip",
    "env_vars": "it is shown on the cluster's pages; name the variables in rollout.cluster.env",
}
OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


def _are_names(names: list[str]) -> list[str]:
    for name in names:
        if not (name.isidentifier() and name.isascii()):
            raise ValueError(f"{name!r} is no name of a variable; the value is taken from this machine's environment")
    return names


VariableNames = Annotated[list[str], AfterValidator(_are_names)]


class RayClusterConfig(Section):
    """An existing Ray cluster, one of whose nodes is this machine."""

    name: Literal["ray"] = "ray"
    """The kind of cluster."""
    address: str = "auto"
    """The cluster's address, HOST:PORT. auto takes RAY_ADDRESS, or else the cluster whose node this machine is."""
    cpus: Annotated[PositiveFloat, Field(le=MAX_RESOURCE)] = 1.0
    """The number of processors that each process of rollouts reserves on its node."""
    resources: dict[str, Annotated[PositiveFloat, Field(le=MAX_RESOURCE)]] = {}
    """Custom resources of Ray that each process reserves besides, such as {sandbox: 1}; it then runs on nodes that have
    them."""
    runtime_env: dict[str, JsonValue] = {}
    """Further keys of Ray's runtime_env that the function needs on the nodes, such as {pip: [httpx, numpy]}."""
    env: VariableNames = []
    """Names of environment variables of this machine that are set on the nodes too. No others are."""
    exclude: list[str] = []
    """Patterns of files and directories that are not sent to the nodes, such as ["data", "*.csv"]."""
    max_file_mb: PositiveFloat = 20.0
    """A file of the config's directory above this size in MB is not sent to the nodes."""
    gateway_url: str | None = None
    """The address at which nodes reach the gateway, such as http://10.0.0.5:8000, if it is not the one that the gateway
    listens on (a mapped port). null: this machine's address in the cluster."""
    wait_s: Seconds = 600.0
    """The longest wait in seconds for free resources of the cluster. After it the run stops, and can be resumed."""
    python: Path | None = None
    """A Python on this machine that has Ray in the cluster's versions, or the directory of its environment. null: the
    Python that art runs in."""

    @field_validator("address")
    @classmethod
    def _is_existing(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(
                "this machine must be a node of the cluster, because the nodes call its gateway: "
                "`ray start --address=HOST:6379 --num-cpus=0` here, then address: auto"
            )
        host, _, port = address.rpartition(":")
        if address != "auto" and not (host and port.isdecimal() and 0 < int(port) <= 65535):
            raise ValueError(f"{address!r}: expected HOST:PORT, or auto")
        return address

    @field_validator("runtime_env")
    @classmethod
    def _leaves_ours(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in OWN_RUNTIME_ENV.keys() & given.keys():
            raise ValueError(f"{name}: {OWN_RUNTIME_ENV[name]}")
        return given

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, given: dict[str, float]) -> dict[str, float]:
        for name in given.keys() & set(OWN_RESOURCES):
            raise ValueError(f"{name} is no custom resource; rollout.cluster.cpus reserves processors")
        return given

    @field_validator("gateway_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r}: expected http://HOST:PORT")
        return None if url is None else url.rstrip("/").removesuffix("/v1")

    @field_validator("exclude")
    @classmethod
    def _are_not_empty(cls, patterns: list[str]) -> list[str]:
        if not all(pattern.strip("/") for pattern in patterns):
            raise ValueError("an empty pattern; leave it out")
        return patterns


def cluster_conflicts(*, processes: int | None, python: Path | None, entry: str | None) -> Iterator[tuple[str, str]]:
    """(key, message) for each setting of a rollout that contradicts its cluster. `processes` is None if not set."""
    if processes == 0:
        yield "processes", "with rollout.cluster the function runs on other machines; leave one of them out"
    if python is not None:
        yield (
            "python",
            "names a Python of this machine, and with rollout.cluster Ray's Python on each node runs the function; "
            "name its packages in rollout.cluster.runtime_env: {pip: [...]}",
        )
    file = (entry or "").rpartition(":")[0]
    if file.endswith(".py") and (Path(file).is_absolute() or ".." in Path(file).parts):
        yield "entry", f"{file} is not in the config's directory, which alone is sent to the nodes of rollout.cluster"
