"""`learner.processes` behind `art backend`: two processes train what one trains, and a dead one ends the server."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from art_cli.config.schema import TorchLearnerConfig
from art_cli.learners.optimizer import Adam
from art_cli.learners.samples import Floats
from art_cli.runtime.errors import LearnerError
from art_cli.tinker.server.adapter_pool import AdapterLearners
from art_cli.tinker.server.base_model import Base, ClientLearner, Parts
from art_cli.tinker.server.datums import Datum
from tests.support.models.tiny import save_tiny_base
from tests.support.processes import forked
from tests.support.servers.backend_server import Client, datum, passing, tiny_base

ADAM = Adam(learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def several(alone: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    base = Base(alone.weights, name="tiny", lora=None, learner=TorchLearnerConfig(processes=2, micro_batch_tokens=64))
    base.start(tmp_path_factory.mktemp("logs"))
    yield base
    base.close()


def make_data(num: int, seed: int = 0) -> list[Datum]:
    """Sequences of ppo, some with rows that are left out and one that asks for another target."""
    draw, data = np.random.default_rng(seed), []
    for number in range(num):
        ids = draw.integers(0, 250, 12 + 5 * number)
        targets = ids[1:, None].copy()
        if number == 1:
            targets[3] = 42
        numbers: dict[str, Floats] = {
            "advantages": draw.normal(size=targets.shape),
            "logprobs": draw.normal(-5.0, 0.7, targets.shape),
        }
        rows = np.arange(2, len(targets)) if number % 2 == 0 else None
        data.append(Datum(inputs=ids[:-1], targets=targets, numbers=numbers, rows=rows))
    return data


def learners(several: Base, alone: Base) -> tuple[ClientLearner, ClientLearner]:
    two, one = (base.new_learner(4, 7, Parts()) for base in (several, alone))
    return two, one


def tensors(learner: ClientLearner, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    learner.save(directory, optimizer=True)
    return load_file(directory / "adapter_model.safetensors")


def gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.slow
def test_two_processes_train_what_one_trains(several: Base, alone: Base, tmp_path: Path) -> None:
    """Logprobs, loss, gradients that add up over two passes, the update, and what is sampled from afterwards."""
    two, one = learners(several, alone)
    for seed in (0, 1):
        found, expected = (each.run(make_data(5, seed), "ppo", {}, backward=True) for each in (two, one))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert (found.num_tokens, found.clip_fraction) == (expected.num_tokens, expected.clip_fraction)
        for row, same in zip(found.logprobs, expected.logprobs, strict=True):
            assert row == pytest.approx(same, abs=1e-5)
    assert two.update(ADAM, max_norm=1.0) == pytest.approx(one.update(ADAM, max_norm=1.0), rel=1e-4)
    assert two.num_updates == one.num_updates == 1
    assert gap(tensors(two, tmp_path / "two"), tensors(one, tmp_path / "one")) < 1e-5
    assert two.score([1, 2, 3, 4]) == pytest.approx(one.score([1, 2, 3, 4]), abs=1e-5)
    copied = two.copy_weights()
    state = {name: p for name, p in copied.model.named_parameters() if "lora_" in name}
    assert len(state) > 0 and any(float(p.abs().max()) > 0 for name, p in state.items() if "lora_B" in name)
    two.close()


@pytest.mark.slow
def test_fewer_data_than_processes_and_a_resume(several: Base, alone: Base, tmp_path: Path) -> None:
    """A process without a pack takes part all the same; another adapter goes on from what was saved."""
    two, one = learners(several, alone)
    for each in (two, one):
        each.run(make_data(1), "ppo", {}, backward=True)
        each.update(ADAM, max_norm=0.0)
    tensors(two, tmp_path / "saved")
    again = several.saved_learner(tmp_path / "saved")
    again.load(tmp_path / "saved", optimizer=True)
    assert again.num_updates == 1
    for each in (again, one):
        each.run(make_data(3), "ppo", {}, backward=True)
        each.update(ADAM, max_norm=0.0)
    assert gap(tensors(again, tmp_path / "again"), tensors(one, tmp_path / "one")) < 1e-5
    two.close(), again.close()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_process_fails_in_all_and_they_go_on(several: Base) -> None:
    two = several.new_learner(4, 0, Parts())
    good = make_data(4)
    bad = Datum(
        inputs=good[2].inputs,
        targets=good[2].targets,
        numbers={**good[2].numbers, "logprobs": np.full(good[2].targets.shape, -1e4)},
    )
    with pytest.raises(LearnerError, match=r"data\[2\]: its loss is not finite"):
        two.run([*good[:2], bad, good[3]], "importance_sampling", {}, backward=True)
    assert two.update(ADAM, max_norm=0.0) == 0.0
    two.run(good, "ppo", {}, backward=True)
    assert two.update(ADAM, max_norm=0.0) > 0.0
    two.close()


def test_data_are_the_same_after_they_were_sent() -> None:
    data = make_data(3)
    run = AdapterLearners.methods["run"]
    given = run.encode({"data": data, "loss": "ppo", "settings": {}, "backward": True})
    for found, sent in zip(run.decode(given)["data"], data, strict=True):
        assert (found.inputs == sent.inputs).all() and (found.targets == sent.targets).all()
        assert all((found.numbers[name] == values).all() for name, values in sent.numbers.items())
        assert (found.computed == sent.computed).all()


@pytest.mark.slow
def test_the_server_trains_and_samples_and_ends_when_a_process_dies(tmp_path: Path) -> None:
    """A client trains by the protocol; then a process is killed, and the server ends with one line that says so."""
    base = save_tiny_base(tmp_path / "base", hidden=32)
    command = ["backend", "--base", base, "--port", "0", "--json", "--checkpoints", tmp_path / "kept"]
    server = forked.Forked([*command, "learner=torch", "learner.processes=2"], stdout=forked.PIPE, stderr=forked.PIPE)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"]
        with Client(address) as client:
            client.base_model = str(base)
            train_and_sample(client)
            os.kill(process_of_rank(1, server.pid), signal.SIGKILL)
            _, errors = server.communicate(timeout=90)
        assert server.returncode == 1
        assert "learner process 1 of 2 died" in errors and "Traceback" not in errors
        assert re.search(r"torch's store listens on (\S+:\d+(, )?)+ without a key", errors)
    finally:
        server.kill()
        server.communicate()


def train_and_sample(client: Client) -> None:
    model, data = client.new_model(), passing(datum([1, 2, 3, 4]))
    before = client.call("forward", model_id=model, forward_input=data, seq_id=1)
    client.call("forward_backward", model_id=model, forward_backward_input=data, seq_id=2)
    client.call("optim_step", model_id=model, adam_params={"learning_rate": 1e-2}, seq_id=3)
    after = client.call("forward", model_id=model, forward_input=data, seq_id=4)
    assert after["metrics"]["loss:sum"] < before["metrics"]["loss:sum"]
    saved = client.call("save_weights_for_sampler", model_id=model, path="a", seq_id=5)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    sample = client.call("asample", prompt=prompt, sampling_params={"max_tokens": 3}, model_path=saved["path"])
    assert 1 <= len(sample["sequences"][0]["tokens"]) <= 3


def process_of_rank(rank: int, server: int) -> int:
    """The id of that process of the server's learner."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = ((place / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            is_ours = b"art_cli.learners.processes.worker" in words and f"RANK={rank}".encode() in variables
            if is_ours and server in ancestors(int(place.name)):
                return int(place.name)
    raise AssertionError(f"the server {server} has no process of rank {rank}")


def ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found
