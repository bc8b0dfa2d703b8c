"""The server of the Tinker protocol over HTTP: order, repetition, refusals, owners, checkpoints, sampling, its end."""

import io
import random
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from art_cli.learners.optimizer import Adam
from art_cli.models.adapters import on_base
from art_cli.models.weights import token_logprobs
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_checkpoints import find
from art_cli.tinker.client.remote_checkpoint import reachable
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.adapter_learner import AdapterLearner
from art_cli.tinker.server.base_model import Base, Parts
from art_cli.tinker.server.datums import Datum
from tests.support.servers.backend_server import Client, datum, passing, serving, tiny_base

IDS = [list(range(10 + number, 40 + number)) for number in range(4)]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
Tensors = dict[str, torch.Tensor]


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
    made = Client(address)
    yield made
    made.post(f"sessions/{made.session}/finish", reason={"type": "success"})
    made.http.close()


def adapter(client: Client, uri: str) -> Tensors:
    """The tensors of a checkpoint, downloaded as one file."""
    _, _, run, kind, name = uri.split("/")
    found = client.http.get(f"training_runs/{run}/checkpoints/{kind}/{name}/archive", follow_redirects=False)
    assert found.status_code == 302
    archive = httpx.get(found.headers["location"])  # without a key
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as files:
        assert "manifest.json" in files.getnames()
        file = files.extractfile("adapter_model.safetensors")
        assert file is not None
        return load(file.read())


def trained(base: Base, batches: list[list[list[int]]], *, seed: int = 0) -> AdapterLearner:
    """The same steps by a learner in this process."""
    learner = base.new_learner(4, seed, Parts())
    for batch in batches:
        for ids in batch:
            sequence = torch.tensor(ids).numpy()
            ones = torch.ones(len(ids) - 1, 1, dtype=torch.float64).numpy()
            one = Datum(inputs=sequence[:-1], targets=sequence[1:, None], numbers={"weights": ones})
            learner.run([one], "cross_entropy", {}, backward=True)
        learner.update(Adam(1e-2, (0.9, 0.95), 1e-8, 0.0), max_norm=1.0)
    return learner


def saved(learner: AdapterLearner, directory: Path) -> Tensors:
    directory.mkdir()
    learner.save(directory, optimizer=False)
    return load((directory / "adapter_model.safetensors").read_bytes())


def are_equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def steps_of(model: str, batches: list[list[list[int]]]) -> list[tuple[str, dict[str, Any]]]:
    """The requests of the steps, numbered from 1."""
    requests: list[tuple[str, dict[str, Any]]] = []
    for batch in batches:
        for ids in batch:
            requests.append(("forward_backward", {"forward_backward_input": passing(datum(ids))}))
        requests.append(("optim_step", {"adam_params": ADAM}))
    return [(path, {"model_id": model, "seq_id": n, **fields}) for n, (path, fields) in enumerate(requests, 1)]


@pytest.mark.slow
def test_requests_in_any_order_and_sent_again_give_the_steps_of_a_local_learner(
    client: Client, base: Base, tmp_path: Path
) -> None:
    """Every request is sent three times, last first; the adapter is bit for bit that of the same calls in order."""
    batches = [IDS[:2], IDS[2:]]
    model = client.new_model()
    requests = steps_of(model, batches)
    ids = set()
    for path, fields in [*reversed(requests), *requests, *requests[3:]]:
        ids.add(client.post(path, **fields)["request_id"])
    assert len(ids) == len(requests)
    assert all("error" not in client.result(id) for id in ids)
    uri = client.call("save_weights", model_id=model, seq_id=len(requests) + 1, path="end")["path"]
    assert are_equal(adapter(client, uri), saved(trained(base, batches), tmp_path / "local"))


def test_a_number_is_for_one_request_only(client: Client) -> None:
    model = client.new_model()
    client.call("optim_step", model_id=model, seq_id=1, adam_params=ADAM)
    other = {"model_id": model, "seq_id": 1, "adam_params": {**ADAM, "learning_rate": 1.0}}
    refused = client.http.post("optim_step", json=other)
    assert refused.status_code == 400 and "another request" in refused.text


@pytest.mark.slow
def test_a_pass_that_is_refused_takes_its_turn_and_spoils_the_step(client: Client, base: Base, tmp_path: Path) -> None:
    """Its number does not block later ones. The next update fails, because the gradient is not whole; then all goes on
    with the weights as they were."""
    model = client.new_model()
    for number, bad in enumerate(
        [
            passing(datum(IDS[0]), loss="stable_reinforce"),
            passing(datum([1, 2, 10**6])),
            passing({"model_input": 7}),
            passing(datum([5, 6], [float(10**39)])),
        ]
    ):
        first = 1 + 3 * number
        good = {"model_id": model, "seq_id": first, "forward_backward_input": passing(datum(IDS[0]))}
        wrong = {"model_id": model, "seq_id": first + 1, "forward_backward_input": bad}
        assert "metrics" in client.call("forward_backward", **good)
        failed = client.call("forward_backward", **wrong)
        assert failed["category"] == "user" and failed["error"], failed
        spoiled = client.call("optim_step", model_id=model, seq_id=first + 2, adam_params=ADAM)
        assert "not whole" in spoiled["error"]
    uri = client.call("save_weights_for_sampler", model_id=model, seq_id=13, path="same")["path"]
    assert are_equal(adapter(client, uri), saved(trained(base, []), tmp_path / "local"))


@pytest.mark.slow
def test_a_checkpoint_goes_on_bit_for_bit_also_on_a_new_server(base: Base, tmp_path: Path) -> None:
    with serving(base, tmp_path / "root") as address, Client(address) as first:
        model = first.new_model(seed=3)
        requests = steps_of(model, [IDS[:1], IDS[1:2]])
        for path, fields in requests[:2]:
            assert "error" not in first.call(path, **fields)
        uri = first.call("save_weights", model_id=model, seq_id=3, path="step_0007")["path"]
        for path, fields in requests[2:]:
            assert "error" not in first.call(path, **fields | {"seq_id": fields["seq_id"] + 1})
        end = first.call("save_weights", model_id=model, seq_id=6, path="end")["path"]
        wanted = adapter(first, end)
    _, _, run, kind, name = uri.split("/")
    at = tmp_path / "root" / run / kind / name
    assert verify_checkpoint(at).step == 7
    assert find(at) is not None  # as `art serve` and `art export` find it
    with serving(base, tmp_path / "root") as address, Client(address) as second:
        info = second.post("weights_info", tinker_path=uri)
        assert (info["lora_rank"], info["base_model"]) == (4, "tiny")
        made = second.call("load_weights", session_id=second.session, model_seq_id=0, path=uri, optimizer=True)
        assert second.http.get(f"training_runs/{run}").json()["last_checkpoint"]["checkpoint_id"] == "weights/end"
        for path, fields in steps_of(made["model_id"], [IDS[1:2]]):
            assert "error" not in second.call(path, **fields)
        again = second.call("save_weights", model_id=made["model_id"], seq_id=3, path="end")["path"]
        assert are_equal(adapter(second, again), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "full", [OSError(28, "No space left on device"), RuntimeError("Error while serializing: I/O error (os error 28)")]
)
def test_a_full_disk_saves_nothing_and_says_so_and_training_goes_on(
    full: Exception, client: Client, base: Base, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(learner: AdapterLearner, directory: Path, *, optimizer: bool) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"half")
        raise full

    model, requests = client.new_model(), steps_of("", [IDS[:1], IDS[1:2]])
    for number, (path, fields) in enumerate(requests, 1):
        if number == 3:
            with monkeypatch.context() as patch:
                patch.setattr(AdapterLearner, "save", save)
                failed = client.call("save_weights", model_id=model, seq_id=3, path="end")
            assert failed == {
                "error": "no space left on the server's disk; nothing was saved: free some there",
                "category": "server",
            }
            assert not list((root / model).rglob("*.safetensors"))
        client.call(path, **fields | {"model_id": model, "seq_id": number + (number > 2)})
    uri = client.call("save_weights", model_id=model, seq_id=6, path="end")["path"]
    assert are_equal(adapter(client, uri), saved(trained(base, [IDS[:1], IDS[1:2]]), tmp_path / "local"))


def test_a_number_names_one_sampler(client: Client) -> None:
    """A second one under it would leave the first one's policy open, where nobody finds it again."""
    model = client.new_model()
    for seq_id, error in ((1, None), (2, "another sampling session was made under this number")):
        made = client.call("save_weights_for_sampler", model_id=model, seq_id=seq_id, sampling_session_seq_id=7)
        assert error in made["error"] if error is not None else "error" not in made


def test_a_download_goes_where_the_client_reaches_the_server() -> None:
    """A proxy speaks https, and the server behind it does not know."""
    here = "http://gpu.example/api/v1/download/abc?x=1"
    assert reachable(here, "https://gpu.example:8443") == "https://gpu.example:8443/api/v1/download/abc?x=1"
    assert reachable("https://store.example/abc", "https://gpu.example") == "https://store.example/abc"


@pytest.mark.slow
def test_samples_are_of_the_weights_as_they_were_with_their_logprobs(client: Client, base: Base, root: Path) -> None:
    """A sampler made before a step samples from the weights before it; logprobs are those of the policy itself."""
    model = client.new_model()
    before = client.call("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0)
    for number, (path, fields) in enumerate(steps_of(model, [IDS[:2]]), 2):
        assert "error" not in client.call(path, **fields | {"seq_id": number})
    uri = client.call("save_weights_for_sampler", model_id=model, seq_id=5, path="after")["path"]
    after = client.post("create_sampling_session", session_id=client.session, sampling_session_seq_id=1, model_path=uri)
    policies = [on_base(base.weights, None), on_base(base.weights, root / uri.removeprefix("tinker://"))]
    for sampler, policy in zip((before, after), policies, strict=True):
        asked = {"max_tokens": 6, "temperature": 0.5, "seed": 1}
        found = client.call(
            "asample",
            sampling_session_id=sampler["sampling_session_id"],
            seq_id=0,
            num_samples=2,
            prompt={"chunks": [{"type": "encoded_text", "tokens": IDS[0][:9]}]},
            sampling_params=asked,
            prompt_logprobs=True,
        )
        assert found["prompt_logprobs"][0] is None
        for sequence in found["sequences"]:
            own = token_logprobs(policy, IDS[0][:9] + sequence["tokens"])
            assert sequence["logprobs"] == pytest.approx(own[8:], abs=1e-4)
            assert found["prompt_logprobs"][1:] == pytest.approx(own[:8], abs=1e-4)
    stop = found["sequences"][0]["tokens"][2]
    ended = client.call(
        "asample",
        sampling_session_id=after["sampling_session_id"],
        seq_id=1,
        prompt={"chunks": [{"type": "encoded_text", "tokens": IDS[0][:9]}]},
        sampling_params={**asked, "stop": [stop]},
    )["sequences"][0]
    assert ended["tokens"][-1] == stop and ended["stop_reason"] == "stop" and len(ended["tokens"]) <= 3


@pytest.mark.slow
def test_clients_have_their_own_and_see_nothing_else(base: Base, tmp_path: Path) -> None:
    with (
        serving(base, tmp_path, keys=("tml-a", "tml-b")) as address,
        Client(address, "tml-a") as mine,
        Client(address, "tml-b") as other,
    ):
        model = mine.new_model()
        uri = mine.call("save_weights", model_id=model, seq_id=1, path="x")["path"]
        step = {"model_id": model, "seq_id": 2, "adam_params": ADAM}
        assert other.http.post("optim_step", json=step).status_code == 404
        assert other.http.post("weights_info", json={"tinker_path": uri}).status_code == 404
        assert other.http.get("training_runs").json()["training_runs"] == []
        assert other.http.post("retrieve_future", json={"request_id": f"{model}:1"}).status_code == 404
        place = f"training_runs/{model}/checkpoints/weights/x"
        assert other.http.delete(place).status_code == 404
        assert mine.http.post(f"{place}/publish").status_code == 200
        assert other.post("weights_info", tinker_path=uri)["lora_rank"] == 4
        assert mine.http.delete(f"{place}/publish").status_code == 200
        assert other.http.post("weights_info", json={"tinker_path": uri}).status_code == 404
        assert mine.http.put(f"{place}/ttl", json={"ttl_seconds": 60}).status_code == 400
        assert mine.http.delete(place).status_code == 200
        assert mine.http.get("checkpoints").json()["checkpoints"] == []
        stranger = httpx.get(f"{address}/api/v1/healthz", headers={"x-api-key": "tml-c"})
        assert stranger.status_code == 401
        assert httpx.get(f"{address.removesuffix('/api/v1')}/health").json() == {"status": "ok"}, "a watcher has no key"
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))
        assert b"tml-a" not in written and b"tml-b" not in written


def test_more_models_than_there_is_room_for_wait(base: Base, tmp_path: Path) -> None:
    with serving(base, tmp_path, limits=BackendLimits(models=1)) as address, Client(address) as client:
        model = client.new_model()
        lora = {"rank": 4}
        waiting = client.post(
            "create_model", session_id=client.session, model_seq_id=1, base_model="tiny", lora_config=lora
        )["request_id"]
        client.call("unload_model", model_id=model)
        assert client.result(waiting)["model_id"].endswith(":train:1")


def test_a_session_that_ends_gives_up_the_model_that_it_waits_for(base: Base, tmp_path: Path) -> None:
    with (
        serving(base, tmp_path / "root", limits=BackendLimits(models=1)) as address,
        Client(address) as first,
        Client(address) as second,
        Client(address) as third,
    ):
        first.new_model()
        lora = {"rank": 4, "seed": 0}
        second.post("create_model", session_id=second.session, model_seq_id=0, base_model="tiny", lora_config=lora)
        for client in (second, first):
            client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
        assert third.new_model().startswith(third.session)


def test_a_session_that_ends_while_its_model_is_made_leaves_the_room_to_others(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, make = threading.Event(), threading.Event(), base.new_learner

    def make_later(*given: Any) -> Any:
        begun.set()
        assert ended.wait(20)
        return make(*given)

    monkeypatch.setattr(base, "new_learner", make_later)
    with (
        serving(base, tmp_path / "root", limits=BackendLimits(models=1)) as address,
        Client(address) as first,
        Client(address) as second,
    ):
        lora = {"rank": 4, "seed": 0}
        first.post("create_model", session_id=first.session, model_seq_id=0, base_model="tiny", lora_config=lora)
        assert begun.wait(20)
        first.post(f"sessions/{first.session}/finish", reason={"type": "success"})
        ended.set()
        assert second.new_model().startswith(second.session)


def test_a_web_page_may_not_ask_a_server_without_a_key(address: str) -> None:
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"content-type": "text/plain"}):
        answer = httpx.post(f"{address}/api/v1/create_session", content=b"{}", headers=headers)
        assert answer.status_code in (403, 415, 421), headers


@pytest.mark.slow
def test_hostile_bodies_are_refused_and_the_server_goes_on(client: Client, address: str) -> None:
    chance = random.Random(0)
    paths = ("create_session", "create_model", "get_info", "forward", "forward_backward", "optim_step", "save_weights",
             "load_weights", "save_weights_for_sampler", "create_sampling_session", "asample", "retrieve_future",
             "weights_info", "telemetry", "unload_model", "cancel_future", "sessions/search")  # fmt: skip
    values: list[Any] = [None, True, -1, 2**70, 1e308, "x" * 300, "tinker://../../etc", [], {}, [[]], {"type": "x"}]
    names = ("model_id", "session_id", "path", "seq_id", "tinker_path", "request_id", "base_model", "lora_config",
             "forward_backward_input", "prompt", "sampling_params", "num_samples", "model_seq_id", "tags")  # fmt: skip
    for path in paths:
        bodies = [b"", b"[]", b"{", b'{"a":' * 5000, chance.randbytes(100)]
        for body in bodies:
            assert client.http.post(path, content=body, headers={"content-type": "application/json"}).status_code < 500
        for _ in range(30):
            fields = {name: chance.choice(values) for name in chance.sample(names, 8)}
            answer = client.http.post(path, json=fields)
            assert answer.status_code < 500, (path, fields, answer.text)
    for size in (0, 1, 2, 50, 5000):
        for _ in range(40):
            body = chance.randbytes(size)
            answer = client.http.post(
                "forward_backward", content=body, headers={"content-type": "application/x-protobuf"}
            )
            assert 400 <= answer.status_code < 500, answer.text
    for path in (
        "training_runs/..%2f..",
        "training_runs/x/checkpoints/weights/..%2f..",
        "downloads/../../etc",
        "samplers/x",
    ):
        assert 400 <= client.http.get(path).status_code < 500
    assert client.http.get("healthz").json() == {"status": "ok"}


@pytest.mark.slow
def test_what_is_too_much_is_refused(client: Client) -> None:
    model = client.new_model()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 2000}]}
    wide = {"rank": 4096}
    for path, fields in [
        ("create_model", {"session_id": client.session, "model_seq_id": 9, "base_model": "tiny", "lora_config": wide}),
        ("asample", {"base_model": "tiny", "prompt": prompt, "sampling_params": {"max_tokens": 5}}),
        ("asample", {"base_model": "tiny", "prompt": {"chunks": []}, "sampling_params": {}}),
        ("asample", {"base_model": "tiny", "prompt": prompt, "sampling_params": {}, "num_samples": 10**9}),
        ("asample", {"base_model": "other", "prompt": prompt, "sampling_params": {}}),
        ("optim_step", {"model_id": model, "seq_id": 10**6, "adam_params": {}}),
    ]:  # fmt: skip
        assert client.http.post(path, json=fields).status_code == 400, path
    huge = client.http.post("telemetry", content=b"x" * (2**26 + 1), headers={"content-type": "application/json"})
    assert huge.status_code == 413
    failed = client.call("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": -1})
    assert "adam_params.learning_rate" in failed["error"]


def test_external_weights_are_offered_file_by_file(client: Client, root: Path) -> None:
    model = client.new_model()
    uri = client.call("save_weights_external", model_id=model, seq_id=1, path="out")["path"]
    offers = client.http.get(f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls").json()
    place = root / uri.removeprefix("tinker://")
    assert {name: httpx.get(url).content for name, url in offers["urls"].items()} == {
        path.name: path.read_bytes() for path in place.iterdir()
    }


def test_without_the_sdk_one_line_names_the_extra(
    art: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    code, out, errors = art("backend", "--base", "nothing-there")
    assert (code, out) == (1, "")
    assert errors == "error: the package tinker is not installed: pip install 'art-cli[tinker]'\n"
