"""Where the nodes of a learner meet: who is admitted, who is refused and why, and that no wait is without an end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.cli.preflight.setup_checks import check_nodes
from art_cli.config.compose import load_config
from art_cli.learners.processes import joined_node as node_module
from art_cli.learners.processes import wire_records as exchange
from art_cli.learners.processes.job import Job, make_job
from art_cli.learners.processes.joined_node import JoinedNode, join
from art_cli.learners.processes.nodes.node_address import Address, NodeSetup, interface_of, read_secret, reserved_port
from art_cli.learners.processes.nodes.node_identity import difference, identity_of
from art_cli.learners.processes.nodes.rendezvous import Meeting, NodeEnd, Rendezvous
from art_cli.learners.processes.remote_calls import LEARNER
from art_cli.learners.samples import Floats
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.learners.step.training_record import StepRecord
from art_cli.runtime.errors import ConfigError, LearnerError, UsageError
from art_cli.runtime.processes import authenticated as sealed
from art_cli.runtime.processes.process_server import answer
from tests.support.paths import LETTERS
from tests.support.processes.waiting import until
from tests.support.servers.ports import free_port

SECRET = b"0123456789abcdef"
IDENTITY = {"package torch": "2.13.0", "device": "cpu", "setting loss.kl": "ab", "setting train.learning_rate": "cd"}
RATE = 2e-4
NODES = ("learner=torch", "learner.nodes=2", "learner.rendezvous=127.0.0.1:29500")


def free_address() -> Address:
    return Address("127.0.0.1", free_port())


class Come:
    """Nodes that come to a rendezvous: `come(rendezvous)` admits one; all are closed at the end."""

    def __init__(self) -> None:
        self.nodes: list[node_module._First] = []

    async def __call__(self, rendezvous: Rendezvous, **changed: str) -> node_module._First:
        node = await node_module._meet(rendezvous.meeting.address, SECRET, {**IDENTITY, **changed}, 30.0)
        self.nodes.append(node)
        return node


@asynccontextmanager
async def meeting(
    *, nodes: int = 2, deadline_s: float = 60.0
) -> AsyncIterator[tuple[Rendezvous, "asyncio.Task[list[NodeEnd]]", Come]]:
    """A rendezvous that listens, its wait, and what comes to it."""
    rendezvous = Rendezvous(Meeting(free_address(), nodes, SECRET, lambda: IDENTITY, "float32", RATE, deadline_s))
    waiting, come = asyncio.ensure_future(rendezvous.meet()), Come()
    try:
        yield rendezvous, waiting, come
    finally:
        for node in come.nodes:
            node.connection.writer.close()
        for end in rendezvous._met:
            await end.close()
        waiting.cancel()
        await asyncio.wait({waiting})
        await rendezvous.close()


async def test_nodes_come_in_any_order_and_one_too_many_is_refused() -> None:
    async with meeting(nodes=3) as (rendezvous, waiting, come):
        first, second = await come(rendezvous), await come(rendezvous)
        met = await waiting
        assert [each.name for each in met] == ["node 1 (127.0.0.1)", "node 2 (127.0.0.1)"]
        assert first.dtype == second.dtype == "float32" and first.own_host == "127.0.0.1"
        with pytest.raises(LearnerError, match="refuses this node: the learner has its 3 nodes already"):
            await come(rendezvous)


async def test_a_node_that_is_not_alike_is_refused_by_name_and_the_next_one_is_admitted() -> None:
    async with meeting() as (rendezvous, waiting, come):
        with pytest.raises(LearnerError, match=r"other versions \(torch 2.12.0 there, 2.13.0 here\)"):
            await come(rendezvous, **{"package torch": "2.12.0"})
        with pytest.raises(LearnerError, match=r"another kind of device \(cuda there, cpu here\)"):
            await come(rendezvous, device="cuda")
        with pytest.raises(LearnerError, match=r"other settings \(loss.kl, train.seed\)"):
            await come(rendezvous, **{"setting loss.kl": "cd", "setting train.seed": "ef"})
        assert not waiting.done()
        await come(rendezvous)
        assert len(await waiting) == 1


async def test_a_node_takes_the_runs_learning_rate_where_its_own_is_open(base: Path, tmp_path: Path) -> None:
    job, auto = job_of(tmp_path, base), "train.learning_rate=auto"
    left_out = identity_of(job).keys() - identity_of(job_of(tmp_path, base, auto)).keys()
    assert left_out == {"setting train.learning_rate"}
    async with meeting() as (rendezvous, waiting, come):
        identity = {name: value for name, value in IDENTITY.items() if name not in left_out}
        node = await node_module._meet(rendezvous.meeting.address, SECRET, identity, 30.0)
        come.nodes.append(node)
        assert len(await waiting) == 1
    assert node_module._as_decided(job_of(tmp_path, base, auto), node).train.learning_rate == RATE
    assert node_module._as_decided(job, node).train.learning_rate == job.train.learning_rate


async def test_a_node_that_leaves_while_others_are_missing_has_no_place() -> None:
    async with meeting(nodes=3) as (rendezvous, waiting, come):
        gone = await come(rendezvous)
        gone.connection.writer.close()
        await until(lambda: rendezvous._met and rendezvous._met[0].has_ended)
        await come(rendezvous)
        assert not waiting.done()
        await come(rendezvous)
        assert len(await waiting) == 2 and not any(each.has_ended for each in waiting.result())


async def test_strangers_are_not_heard_and_do_not_end_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Noise, another secret, and one that knows the secret and says something else."""
    async with meeting() as (rendezvous, waiting, come):
        await asyncio.sleep(0)
        await until(lambda: rendezvous._server is not None)
        for noise in (b"", b"\x80\x04cos\nsystem\n" * 20, bytes(64)):
            reader, writer = await asyncio.open_connection(*rendezvous.meeting.address)
            writer.write(noise)
            writer.write_eof()
            await reader.read()
            writer.close()
        with pytest.raises(LearnerError, match="another ART_NODES_SECRET"):
            await node_module._meet(rendezvous.meeting.address, b"another secret 0", IDENTITY, 30.0)
        reader, writer = await asyncio.open_connection(*rendezvous.meeting.address)
        connection = await sealed.dial(reader, writer, SECRET)
        connection.writer.write(b'{"identity": 7}')
        assert await reader.read() == b""
        writer.close()
        assert not waiting.done() and not rendezvous._met
        await come(rendezvous)
        assert len(await waiting) == 1
    assert SECRET.decode() not in caplog.text


async def test_only_so_many_strangers_are_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cli.learners.processes.nodes.rendezvous.MAX_STRANGERS", 2)
    async with meeting() as (rendezvous, _, _):
        await until(lambda: rendezvous._server is not None)
        silent = [await asyncio.open_connection(*rendezvous.meeting.address) for _ in range(2)]
        await until(lambda: rendezvous._strangers == 2)
        reader, writer = await asyncio.open_connection(*rendezvous.meeting.address)
        assert await reader.read() == b""
        for other in (writer, *(each for _, each in silent)):
            other.close()
        await until(lambda: rendezvous._strangers == 0)


async def test_a_wait_for_nodes_and_a_wait_for_the_first_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with meeting(deadline_s=0.2) as (_, waiting, _):
        with pytest.raises(LearnerError, match="1 of 2 nodes came to 127.0.0.1.* within 0 s; run `art join CONFIG`"):
            await waiting
    with pytest.raises(LearnerError, match="nothing listens at 127.0.0.1.* after 0 s"):
        await node_module._meet(free_address(), SECRET, IDENTITY, 0.3)
    monkeypatch.setattr(sealed, "HANDSHAKE_DEADLINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(LearnerError, match="not a learner.*too slow"):
        await node_module._meet(Address(*mute.getsockname()), SECRET, IDENTITY, 30.0)


async def test_an_address_of_another_machine_is_refused_with_what_would_do() -> None:
    rendezvous = Rendezvous(Meeting(Address("192.0.2.1", 29500), 2, SECRET, lambda: IDENTITY, "float32", RATE, 5.0))
    with pytest.raises(LearnerError, match="cannot listen at 192.0.2.1:29500; learner.rendezvous is an address of"):
        await rendezvous.meet()


# --- the secret -------------------------------------------------------------------------------------------------------


def test_without_a_secret_only_the_loopback_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_NODES_SECRET", raising=False)
    assert read_secret(Address("127.0.0.1", 1)) == b""
    for host in ("0.0.0.0", "192.0.2.1"):
        with pytest.raises(UsageError, match="open to other machines and needs a secret; set ART_NODES_SECRET"):
            read_secret(Address(host, 1))
    monkeypatch.setenv("ART_NODES_SECRET", "short")
    with pytest.raises(UsageError, match="fewer than 16 characters") as caught:
        read_secret(Address("127.0.0.1", 1))
    assert "short" not in str(caught.value)


# --- identity ---------------------------------------------------------------------------------------------------------


def job_of(directory: Path, base: Path, *overrides: str) -> Job:
    config = load_config(LETTERS / "config.yaml", [*NODES, "learner.device=cpu", *overrides]).config
    return make_job(config, str(base), directory=directory, dtype="float32")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.mark.slow
def test_paths_may_differ_and_files_may_not(base: Path, tmp_path: Path) -> None:
    ours = identity_of(job_of(tmp_path, base))
    other = tmp_path / "elsewhere"
    base.rename(other)
    assert difference(ours, identity_of(job_of(tmp_path / "there", other, "learner.join_timeout_s=9"))) == ""
    (other / "README.md").write_text("a note")
    assert difference(ours, identity_of(job_of(tmp_path, other))) == ""
    (other / "model.safetensors").write_bytes(b"weightz")
    assert difference(ours, identity_of(job_of(tmp_path, other))) == "another base model (model.safetensors)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.learning_rate=0.5", "train.learning_rate"),
        ("loss.kl=0.1", "loss.kl"),
        ("learner.processes=2", "learner.processes"),
        ("learner.shard=all", "learner.shard"),
        ("model.lora.rank=8", "model.lora.rank"),
        ("rollout.sampling.max_tokens=7", "sampling_max_tokens"),
    ],
)
def test_a_setting_that_changes_the_step_makes_another_node(
    override: str, named: str, base: Path, tmp_path: Path
) -> None:
    ours, theirs = identity_of(job_of(tmp_path, base)), identity_of(job_of(tmp_path, base, override))
    assert difference(ours, theirs) == f"other settings ({named})"


def test_a_users_algorithm_is_compared_by_its_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...")
    job = job_of(tmp_path, base, "algorithm.entry=mine.py:Mine")
    ours = identity_of(job)
    (tmp_path / "mine.py").write_text("class Mine: pass")
    assert difference(ours, identity_of(job)) == "another algorithm (mine.py)"


# --- what a node takes from the network -------------------------------------------------------------------------------


def a_node(tmp_path: Path, base: Path) -> JoinedNode:
    return JoinedNode(job_of(tmp_path, base), NodeSetup(nodes=2), files=tmp_path, logs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "x.py", "x.json\n"])
def test_a_node_writes_files_of_checkpoints_in_its_own_place_only(name: str, tmp_path: Path, base: Path) -> None:
    with pytest.raises(LearnerError, match="no file of a checkpoint"):
        a_node(tmp_path, base).receive(name, 0, "")
    assert not (tmp_path / "loaded").exists()


def test_a_node_without_processes_answers_no_call_of_a_learner(tmp_path: Path, base: Path) -> None:
    node = a_node(tmp_path, base)
    with pytest.raises(LearnerError, match="before the processes were started"):
        node.score([1, 2], 1.0)
    for number, port in ((0, 80), (2, 80), (1, 0), (1, 70_000)):
        with pytest.raises(LearnerError, match="no place for a node"):
            node.start(number, port)


async def test_a_checkpoint_arrives_as_it_was(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 5 bytes, the empty file and those of the parts too; what no learner reads stays here."""
    monkeypatch.setattr("art_cli.learners.processes.nodes.rendezvous.CHUNK_BYTES", 5)
    sent = tmp_path / "sent"
    contents = {"a.safetensors": b"0123456789abc", "rng.safetensors": b"", "critic/optimizer.json": b'{"a": 1}\n'}
    for name, data in {**contents, "tokenizer.model": b"no", "notes.txt": b"no"}.items():
        (sent / name).parent.mkdir(parents=True, exist_ok=True)
        (sent / name).write_bytes(data)
    node, loaded = a_node(tmp_path, base), tmp_path / "loaded"
    found: dict[str, bytes] = {}

    def load(method: str, params: dict[str, str], progress: object) -> None:
        assert (method, LEARNER["load"].decode(params["given"])) == ("load", {"directory": loaded})
        files = [path for path in loaded.rglob("*") if path.is_file()]
        found.update({str(path.relative_to(loaded)): path.read_bytes() for path in files})

    monkeypatch.setattr(node, "_call", load)
    async with meeting() as (rendezvous, waiting, come):
        first = await come(rendezvous)
        [end] = await waiting
        answering = asyncio.ensure_future(answer(*first.connection, node, heartbeat_s=0.1))
        await asyncio.wait_for(end.call("load", {"given": LEARNER["load"].at(sent)}), 30)
        await end.finish("process 0 died")
        end.hang_up()
        await asyncio.wait_for(answering, 30)
        await end.close()
    assert found == contents and not loaded.exists() and node.end == "process 0 died"


async def test_a_first_node_that_goes_without_a_word_is_told_as_gone(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_NODES_SECRET", SECRET.decode())
    monkeypatch.setattr(node_module, "identity_of", lambda job: IDENTITY)
    async with meeting() as (rendezvous, waiting, come):
        job = job_of(tmp_path, base, f"learner.rendezvous={rendezvous.meeting.address}")
        joining = asyncio.ensure_future(join(job, files=tmp_path, logs=tmp_path, wait_s=30.0))
        [end] = await waiting
        await end.close()
        with pytest.raises(LearnerError, match="the run at 127.0.0.1:.* is gone; start it there again"):
            await asyncio.wait_for(joining, 30)


async def test_a_message_that_a_third_party_changed_ends_the_node_in_words(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: it is no defect of ours."""
    monkeypatch.setenv("ART_NODES_SECRET", SECRET.decode())
    monkeypatch.setattr(node_module, "identity_of", lambda job: IDENTITY)
    async with meeting() as (rendezvous, waiting, come):
        job = job_of(tmp_path, base, f"learner.rendezvous={rendezvous.meeting.address}")
        joining = asyncio.ensure_future(join(job, files=tmp_path, logs=tmp_path, wait_s=30.0))
        [end] = await waiting
        end._writer._writer.write(bytes(7) + b"\x01" + bytes(32) + b"x")
        with pytest.raises(LearnerError, match="cannot be trusted: a message has a wrong seal"):
            await asyncio.wait_for(joining, 30)
        await end.close()


@pytest.mark.slow
async def test_nodes_that_wait_for_the_others_in_vain_are_told(tmp_path: Path, base: Path) -> None:
    async with meeting(nodes=3, deadline_s=5.0) as (rendezvous, waiting, come):
        first, node = await come(rendezvous), a_node(tmp_path, base)
        answering = asyncio.ensure_future(answer(*first.connection, node))
        with pytest.raises(LearnerError, match="2 of 3 nodes came") as late:
            await waiting
        await rendezvous.close(str(late.value))
        assert node.end is not None and node.end.startswith("2 of 3 nodes came")
        rendezvous._met[0].hang_up()
        await asyncio.wait_for(answering, 30)


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_between_processes_are_what_they_were_or_refused() -> None:
    statistics = StepStatistics(frozenset({"t1"}), losses=[0.5, float(np.float64(1) / 3)])
    statistics.logprob_gap.sum, statistics.logprob_gap.count = 0.25, 3
    again = exchange.decode(exchange.encode(statistics), StepStatistics)
    assert (
        msgspec.structs.asdict(again)["losses"] == statistics.losses
        and again.logprob_gap.mean == statistics.logprob_gap.mean
    )
    found = {3: np.array([0.1, np.nan]), 0: np.array([])}
    read = exchange.decode(exchange.encode(found), dict[int, Floats])
    assert read.keys() == found.keys() and all(np.array_equal(read[key], found[key], equal_nan=True) for key in found)
    assert exchange.decode(exchange.encode(StepRecord()), StepRecord).pieces == {}
    for data, kind in (
        (b"\x80\x04cos", bool),
        (exchange.encode([1]), list[str]),
        (exchange.encode({1: b"x"}), dict[int, Floats]),
    ):
        with pytest.raises(ValueError):
            exchange.decode(data, kind)


# --- addresses and settings -------------------------------------------------------------------------------------------


def test_addresses_ports_and_interfaces() -> None:
    assert Address.parse("[::1]:80") == Address("::1", 80) and str(Address("::1", 80)) == "[::1]:80"
    assert Address.parse("node-0.cluster:29500") == Address("node-0.cluster", 29500)
    assert interface_of("127.0.0.1") in ("lo", "lo0", "") and interface_of("192.0.2.1") == ""
    with reserved_port() as port:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("", port))
        with socket.create_server(("", port)):  # with SO_REUSEADDR, as torch's store has it
            pass


def test_a_check_says_the_number_of_ranks_or_why_they_cannot_meet(tmp_path: Path) -> None:
    overrides = ["learner=torch", "learner.nodes=2", "learner.processes=3", f"learner.rendezvous={free_address()}"]
    loaded = load_config(LETTERS / "config.yaml", overrides)
    opened, part = Opened(loaded, tmp_path), SourcePart("", loaded)
    found = check_nodes(opened, part)
    assert found is not None and found.is_good and found.message.startswith("2 nodes x 3 processes = 6 ranks")
    with socket.create_server(Address.parse(overrides[-1].partition("=")[2])):
        found = check_nodes(opened, part)
    assert found is not None and not found.is_good and "cannot listen at" in found.message and found.cure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner=torch", "learner.nodes=2"], "learner.rendezvous: learner.nodes is 2, and they need a place to meet"),
        (["learner=torch", "learner.rendezvous=a:1"], "learner.rendezvous: used with learner.nodes above 1 only"),
        (["learner=torch", "learner.shard=all"], "learner.shard: used with learner.nodes above 1 only"),
        (["learner=torch", "learner.nodes=2", "learner.rendezvous=nowhere"], "learner.rendezvous: .*HOST:PORT"),
        (["learner=unsloth", *NODES[1:]], "learner.nodes: 'unsloth' trains in one process .*; set learner=torch"),
        (["learner=unsloth", "learner.processes=2"], "learner.processes: 'unsloth' trains in one process"),
        (["learner=tinker", "learner.nodes=2"], "'tinker' trains on a server, where learner.nodes has no effect"),
        ([*NODES, "model.quantize=4bit"], "learner.nodes: a base in few bits cannot be divided"),
        ([*NODES, "learner.offload_optimizer=true"], "learner.offload_optimizer: with several processes"),
    ],
)
def test_what_cannot_go_with_nodes_is_refused_with_what_would_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(LETTERS / "config.yaml", overrides)
