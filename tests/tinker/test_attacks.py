"""What several clients, and hostile ones, do to each other on one server: nothing."""

import asyncio
import contextlib
import io
import os
import socket
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load

from art_cli.chat.chat_errors import ChatError
from art_cli.runs.manifest import Manifest
from art_cli.tinker.server import BackendLimits, checkpoint_store, futures, hosts, samplers
from art_cli.tinker.server import checkpoint_store as store
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.futures import Future, FutureAnswer, Futures
from tests.support.servers.backend_server import Client, datum, passing, serving, tiny_base
from tests.tinker.test_backend import ADAM, IDS, are_equal, saved, steps_of, trained


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backend")


@pytest.fixture(scope="module")
def address(base: Base, root: Path) -> Iterator[str]:
    with serving(base, root) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client
        client.post(f"sessions/{client.session}/finish", reason={"type": "success"})


def stored(root: Path, uri: str) -> dict[str, torch.Tensor]:
    return load((root / uri.removeprefix("tinker://") / "adapter_model.safetensors").read_bytes())


@pytest.mark.slow
def test_clients_at_once_train_as_if_they_were_alone(address: str, base: Base, root: Path, tmp_path: Path) -> None:
    """Three clients send their steps interleaved; each adapter is bit for bit that of a learner of its own."""
    batches = [[IDS[number : number + 2], IDS[3 - number : 4 - number]] for number in range(3)]

    def work(number: int) -> str:
        with Client(address) as client:
            model = client.new_model(seed=number)
            requests = steps_of(model, batches[number])
            barrier.wait(60)
            ids = [client.post(path, **fields)["request_id"] for path, fields in requests]
            assert all("error" not in client.result(id) for id in ids)
            return str(client.call("save_weights", model_id=model, seq_id=len(requests) + 1, path="end")["path"])

    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        uris = list(pool.map(work, range(3)))
    for number, uri in enumerate(uris):
        assert are_equal(stored(root, uri), saved(trained(base, batches[number], seed=number), tmp_path / str(number)))


def test_a_client_that_dies_amid_its_requests_holds_up_no_other(address: str, base: Base) -> None:
    """Its last request is cut in the middle, and those behind a missing number never run; others train on."""
    with Client(address) as dead, Client(address) as other:
        model = dead.new_model()
        hole = {"model_id": model, "seq_id": 2, "adam_params": ADAM}
        waiting = dead.post("optim_step", **hole)["request_id"]
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /api/v1/optim_step HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            connection.sendall(f'{head}content-length: 500\r\n\r\n{{"model_id": "{model}"'.encode())
        mine = other.new_model()
        for path, fields in steps_of(mine, [IDS[:1]]):
            assert "error" not in other.call(path, **fields)
        dead.post(f"sessions/{dead.session}/finish", reason={"type": "success"})
        assert "unloaded" in dead.result(waiting)["error"]


def test_a_small_body_cannot_name_many_numbers(address: str) -> None:
    """Sparse tensors whose shapes promise 16 million numbers, in one tensor and in many, as JSON."""

    def sparse(width: int, dtype: str) -> dict[str, object]:
        return {"data": [], "dtype": dtype, "shape": [1, width], "sparse_crow_indices": [0, 0]}

    with Client(address) as client:
        model = client.new_model()
        for number, (width, count) in enumerate(((1 << 24, 1), (1 << 21, 8)), 1):
            bomb = {**datum([1, 2]), "loss_fn_inputs": {"target_tokens": sparse(width, "int64")}}
            failed = client.call(
                "forward_backward", model_id=model, seq_id=number, forward_backward_input=passing(*[bomb] * count)
            )
            assert "sparse tensor" in failed["error"] and failed["category"] == "user"


def test_compressed_bodies_and_names_that_leave_the_directory_are_refused(address: str, root: Path) -> None:
    with Client(address) as client:
        model = client.new_model()
        before = {path for path in root.parent.rglob("*") if path.parent == root.parent}
        for encoding in ("zstd", "gzip", "br", "deflate"):
            headers = {"content-encoding": encoding, "content-type": "application/x-protobuf"}
            answer = client.http.post("forward_backward", content=b"\x28\xb5\x2f\xfd" * 9, headers=headers)
            assert answer.status_code == 415, encoding
        for name in ("../x", "..", "a/b", "x" * 129, "\0", "a\nb", ".hidden", "ü", "", "~", "a\\b"):
            failed = client.http.post("save_weights", json={"model_id": model, "path": name})
            assert failed.status_code == 400 and "checkpoint's name" in failed.text, name
            for uri in (f"tinker://{model}/weights/{name}", f"tinker://../{name}/x"):
                assert client.http.post("weights_info", json={"tinker_path": uri}).status_code in (400, 404), uri
        assert {path for path in root.parent.rglob("*") if path.parent == root.parent} == before
        assert not list((root / model).glob("weights/*"))
        assert httpx.get(f"{address}/api/v1/healthz").status_code == 200


def test_a_flood_of_one_clients_answers_drops_none_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number and by their bytes. The flooder loses first what it has fetched, then its oldest."""
    monkeypatch.setattr(futures, "MAX_KEPT", 20)
    monkeypatch.setattr(futures, "MAX_KEPT_BYTES", 2**20)
    kept = Futures(pending=100, pending_bytes=2**30)

    def answer(owner: str, number: int, num_bytes: int = 1) -> Future:
        future, _ = kept.add(f"{owner}{number}", owner, b"")
        kept.settle(future, FutureAnswer(dict, num_bytes=num_bytes))
        return future

    for number in range(3):
        answer("b", number)
    kept.mark_fetched(answer("a", 0))
    kept.mark_fetched(answer("a", 30))
    for number in range(1, 17):
        answer("a", number)
    with pytest.raises(ChatError):
        kept.get("a0", "a")
    for number in range(100, 105):
        answer("a", number, 2**19)
    for number in range(3):
        assert kept.get(f"b{number}", "b").result is not None
    assert kept.get("a104", "a").result is not None
    answer("a", 200, 2**30)
    assert kept.get("a200", "a") and kept.get("b0", "b"), "one answer is kept, however large"


def test_unanswered_requests_of_one_client_are_bounded_by_what_they_hold(base: Base, tmp_path: Path) -> None:
    """Passes behind a missing number are refused once they hold too much; the missing one is taken, and they run."""
    data = passing(datum(list(range(1, 60))))
    with (
        serving(base, tmp_path, limits=BackendLimits(pending_bytes=4000)) as address,
        Client(address) as client,
    ):
        model = client.new_model()
        statuses = [
            client.http.post("forward", json={"model_id": model, "seq_id": number, "forward_input": data}).status_code
            for number in (2, 3, 4, 5)
        ]
        assert statuses == [200, 200, 429, 429]
        assert all("metrics" in client.call("forward", model_id=model, seq_id=n, forward_input=data) for n in (1, 2, 3))


def test_what_a_client_names_is_bounded(client: Client) -> None:
    """Sessions, models and checkpoints; a session's notes are found again."""
    large, many = {"x": "y" * 20_000}, {str(number): 1 for number in range(100)}
    model = client.new_model()
    lora = {"rank": 4}
    for path, fields in [
        ("create_session", {"user_metadata": large}),
        ("create_session", {"display_name": "n" * 20_000}),
        ("create_model", {"session_id": client.session, "model_seq_id": 7, "base_model": "tiny", "lora_config": lora,
                          "user_metadata": many}),
    ]:  # fmt: skip
        answer = client.http.post(path, json=fields)
        assert answer.status_code == 400 and "at most" in answer.text, path
    failed = client.call("save_weights", model_id=model, seq_id=1, path="x", user_metadata={"x": "y" * 20_000})
    assert "at most" in failed["error"]
    named = client.post("create_session", user_metadata={"a": "b"}, display_name="Mine", tags=["t"])["session_id"]
    found = client.post("sessions/search", display_name="mine", user_metadata={"a": "b"})["sessions"]
    assert [each["session_id"] for each in found] == [named]


def test_the_oldest_sampling_session_of_a_client_makes_room(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "MAX_SAMPLERS", 3)
    fields = {"session_id": client.session, "base_model": "tiny"}
    ids = [
        client.post("create_sampling_session", **fields, sampling_session_seq_id=number)["sampling_session_id"]
        for number in range(5)
    ]
    assert [client.http.get(f"samplers/{id}").status_code for id in ids] == [404, 404, 200, 200, 200]


def test_checkpoints_are_hashed_when_they_are_opened_and_never_on_the_event_loop(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request that reads one. Samples from a policy that is open hash nothing, and a damaged one is refused."""
    hashing, verify = list[str](), store.verify_checkpoint

    def watched(directory: Path) -> Manifest:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            hashing.append("thread")
        else:
            hashing.append("event loop")
        return verify(directory)

    for module in (store, hosts):
        monkeypatch.setattr(module, "verify_checkpoint", watched)
    model = client.new_model()
    uri = client.call("save_weights", model_id=model, seq_id=1, path="x")["path"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    sample = {"prompt": prompt, "sampling_params": {"max_tokens": 1}, "model_path": uri}
    client.post("create_sampling_session", session_id=client.session, sampling_session_seq_id=0, model_path=uri)
    assert hashing == []
    for _ in range(3):
        assert "sequences" in client.call("asample", **sample)
    assert hashing == ["thread"]
    client.call("load_weights", model_id=model, seq_id=2, path=uri)
    client.call("load_weights", session_id=client.session, model_seq_id=9, path=uri)
    client.post("weights_info", tinker_path=uri)
    client.http.get(f"training_runs/{model}/checkpoints/weights/x/archive", follow_redirects=False)
    assert set(hashing) == {"thread"} and len(hashing) == 5
    again = client.call("save_weights", model_id=model, seq_id=3, path="damaged")["path"]
    damaged = root / again.removeprefix("tinker://") / "adapter_model.safetensors"
    damaged.write_bytes(b"o" * damaged.stat().st_size)
    failed = client.call("asample", **{**sample, "model_path": again})
    assert "does not match its hash" in failed["error"] and failed["category"] == "user"


def test_a_download_makes_no_copy_and_is_a_whole_archive(client: Client, root: Path, tmp_path: Path) -> None:
    uri = client.call("save_weights", model_id=client.new_model(), seq_id=1, path="x")["path"]
    directory = root / uri.removeprefix("tinker://")
    made = b"".join(checkpoint_store.tar_pieces(directory))
    assert len(made) == checkpoint_store.tar_length(directory)
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        archive.extractall(tmp_path, filter="data")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def listeners() -> set[tuple[str, int]]:
    """The addresses and ports on which this process listens."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def test_a_learner_in_one_process_on_one_machine_opens_no_port(base: Base, tmp_path: Path) -> None:
    """While it trains the server's own address is the only new one; torch has no process group and no store."""
    before = listeners()
    with serving(base, tmp_path) as address, Client(address) as client:
        for path, fields in steps_of(client.new_model(), [IDS[:1]]):
            assert "error" not in client.call(path, **fields)
        assert listeners() - before == {("0100007F", int(address.rpartition(":")[2]))}
        assert not torch.distributed.is_initialized()
