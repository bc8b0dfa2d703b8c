"""Setup checks: engine, object store, nodes, run directory, trackers, cluster."""

import os
import socket
import uuid
from importlib.util import find_spec
from urllib.parse import urlsplit

from art_cli.cli import Finding
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.config.schema import BaseLearnerConfig, VllmEngineConfig
from art_cli.engines.vllm.arguments import check_gpus, find_vllm, has_gpu
from art_cli.learners.processes.nodes.node_address import Address, read_secret
from art_cli.loop.decide import describe
from art_cli.loop.record import find_clash
from art_cli.reports.trackers import check_tracker, trackers_of
from art_cli.rollouts.cluster.cluster_rollout import cluster_rollout
from art_cli.rollouts.cluster.ray_driver import ClusterFacts
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.object_store import ObjectStore, holder
from art_cli.runtime import threads
from art_cli.runtime.errors import EngineError, StorageError, UsageError

CONNECT_TIMEOUT_S = 10.0  # longest wait for a connection to the vLLM server at engine.base_url


def check_engine(opened: Opened) -> Finding:
    """Shows the automatic choices (engine, learner, memory), and checks that a configured vLLM works."""
    engine = opened.loaded.config.engine
    if isinstance(engine, VllmEngineConfig):
        problem, cure = _vllm_problem(engine, opened.loaded.config.model.quantize)
        if problem:
            return Finding("engine", False, problem, cure)
    return Finding("auto", True, describe(opened.loaded))


def check_store(opened: Opened, part: SourcePart) -> Finding | None:
    """Writes an object to the run's object store, reads it, and deletes it."""
    if (address := part.loaded.config.store) is None:
        return None
    store, name = ObjectStore(address), f"art-check-{uuid.uuid4().hex[:12]}"
    try:
        is_made = store.create(name, b"art")
        is_made_again = store.create(name, b"again")
        is_read = store.read(name, limit=100) == b"art"
        store.delete([name])
        if busy := holder(store / part.loaded.config.name):
            return Finding("store", False, busy)
    except StorageError as error:
        cure = "mend the address, or give this machine the right to list, read, write and delete there"
        return Finding("store", False, str(error), cure)
    if not is_made or not is_read:
        return Finding("store", False, f"{address}: a written object cannot be read back", "name another store")
    note = "; the store has no atomic create, so never start two machines on one run in the same second"
    return Finding("store", True, f"{address}: can be written{note if is_made_again else ''}")


def check_nodes(opened: Opened, part: SourcePart) -> Finding | None:
    """Checks that this machine can listen at the address where the learner's nodes meet."""
    learner = part.loaded.config.learner
    if learner.nodes == 1:
        return None
    assert isinstance(learner, BaseLearnerConfig) and learner.rendezvous is not None
    address = Address.parse(learner.rendezvous)
    secret = read_secret(address)
    try:
        socket.create_server(address).close()
    except OSError as error:
        cure = "set learner.rendezvous to an address of this machine and a free port"
        return Finding("nodes", False, f"cannot listen at {address}: {error.strerror or error}", cure)
    ranks = f"{learner.nodes} nodes x {learner.processes} processes = {learner.num_ranks} ranks"
    note = "" if secret else "; without a secret, because only this machine reaches it"
    return Finding("nodes", True, f"{ranks}, which meet at {address}{note}; the update below is this machine's alone")


def check_run(opened: Opened, part: SourcePart) -> Finding | None:
    """Checks whether `art train` could resume an existing run of this name."""
    run = RunDir(part.loaded.config.runs / part.loaded.config.name)
    steps = run.checkpoint_steps()
    if not steps:
        return None
    if clash := find_clash(run, part.loaded):
        return Finding("run", False, clash)
    return Finding("run", True, f"{run.root}: art train resumes from step {steps[-1]}")


def check_trackers(opened: Opened, part: SourcePart) -> Finding | None:
    """Looks for the trackers' packages and API keys, without a request."""
    chosen = trackers_of(part.loaded.config)
    for tracker in chosen:
        try:
            check_tracker(tracker)
        except UsageError as error:
            problem, _, cure = str(error).partition("; ")
            return Finding("trackers", False, problem, cure)
    names = ", ".join(getattr(each, "entry", each.name) for each in chosen)
    return Finding("trackers", True, names) if chosen else None


def check_cluster(opened: Opened, part: SourcePart) -> Finding | None:
    cluster = part.loaded.config.rollout.cluster
    if cluster is None:
        return None
    facts = threads.run(_ask_cluster(part))
    message = (
        f"Ray {facts.version}, {facts.nodes} nodes, {facts.processors:g} processors, {facts.free:g} of them free; "
        f"nodes reach this machine at {facts.host}"
    )
    cure = "rollouts wait until that many processors are free" if facts.free < cluster.cpus else ""
    return Finding("cluster", True, message, cure)


async def _ask_cluster(part: SourcePart) -> ClusterFacts:
    """Raises UsageError or RolloutError if the cluster cannot be used."""
    rollout = cluster_rollout(part.loaded.config, part.loaded.directory)
    try:
        return await rollout.connect()
    finally:
        await rollout.close()


def _vllm_problem(engine: VllmEngineConfig, quantize: str | None) -> tuple[str, str]:
    """Returns the reason why the configured vLLM cannot be used, and the cure; "" for the reason if it can."""
    cure = "pip install 'art-cli[vllm]', name a Python that has it in engine.python, or engine=embedded"
    if engine.base_url is not None:
        address = urlsplit(engine.base_url)
        try:
            socket.create_connection((address.hostname or "", address.port or 80), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            problem = f"engine.base_url: nothing answers at {engine.base_url}: {error}"
            return problem, "start it, or mend engine.base_url"
        return "", ""
    try:
        if has_gpu({**os.environ, **engine.env}):
            check_gpus(engine)
    except EngineError as error:
        return str(error), ""
    if engine.python is None and find_spec("vllm") is None:
        return "engine is vllm, and vLLM is not installed", cure
    vllm = find_vllm(engine.python)
    if not vllm.version:
        return f"engine is vllm, and vLLM does not work in {vllm.python}: {vllm.error}", cure
    return vllm.lacks(quantize), vllm.plugin_cure
