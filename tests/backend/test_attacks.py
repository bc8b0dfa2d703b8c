"""What several clients, and hostile ones, do to each other on one server: nothing."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load

from art_cli.backend.base import Base
from tests.backend.test_backend import ADAM, IDS, are_equal, saved, steps_of, trained
from tests.support.backend_server import Client, datum, passing, serving, tiny_base


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


def stored(root: Path, uri: str) -> dict[str, torch.Tensor]:
    return load((root / uri.removeprefix("tinker://") / "adapter_model.safetensors").read_bytes())


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
