"""`art backend` with a real vLLM on the CPU as its engine: several clients' adapters in one server."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.schema import ModelConfig, TorchLearnerConfig, VllmEngineConfig
from art_cli.models.adapters import on_base
from art_cli.models.loading import load_weights
from art_cli.models.weights import token_logprobs
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from tests.support.others.real_vllm import IS_THERE, PYTHON, QUICK
from tests.support.paths import LETTERS
from tests.support.servers.backend_server import Client, datum, passing, serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_THERE, reason="no .venv-vllm and no ART_VLLM_PYTHON: make test-vllm"),
]
PROMPT = [5, 9, 14, 20, 7, 33, 41]
ADAM = {"learning_rate": 3e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    sys.path.insert(0, str(LETTERS))
    from build import build_wide

    directory = tmp_path_factory.mktemp("wide") / "base"
    build_wide(directory)
    weights = load_weights(ModelConfig(base=str(directory), lora=None, dtype="float32"), str(directory), device="cpu")
    return Base(weights, name="tiny", lora=None, learner=TorchLearnerConfig())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backend")


@pytest.fixture(scope="module")
def address(base: Base, root: Path) -> Iterator[str]:
    quick = {**QUICK, "args": {**QUICK["args"], "max-loras": 1, "max-num-seqs": 8}}
    engine = VllmEngineConfig.model_validate({"name": "vllm", "python": PYTHON, **quick})
    with serving(base, root, limits=BackendLimits(rank=8), engine=engine, start_s=300) as address:
        yield address


def sample(client: Client, sampler: str, number: int, **sampling: Any) -> dict[str, Any]:
    return client.call(
        "asample",
        sampling_session_id=sampler,
        seq_id=number,
        num_samples=2,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": 6, "seed": 1, **sampling},
        prompt_logprobs=True,
    )


def test_adapters_of_several_clients_are_sampled_from_one_server(address: str, base: Base, root: Path) -> None:
    """Two clients at once, with room for one adapter: each waits for the other, and gets samples of its own policy with
    that policy's own logprobs, at any temperature. Then the base, and what is refused."""

    def work(number: int) -> None:
        with Client(address) as client:
            model = client.new_model()
            for step in range(2):
                ids = [(3 + 5 * number + step + token) % 40 for token in range(12)]
                at = 3 * step + 1
                client.call("forward_backward", model_id=model, seq_id=at, forward_backward_input=passing(datum(ids)))
                client.call("optim_step", model_id=model, seq_id=at + 1, adam_params=ADAM)
                made = client.call(
                    "save_weights_for_sampler", model_id=model, seq_id=at + 2, sampling_session_seq_id=step
                )
                barrier.wait(120)
                found = [sample(client, made["sampling_session_id"], 0, temperature=0.5, top_k=9)]
            saved = client.call("save_weights_for_sampler", model_id=model, seq_id=7, path="end")["path"]
            opened = client.post(
                "create_sampling_session", session_id=client.session, sampling_session_seq_id=9, model_path=saved
            )
            found.append(sample(client, opened["sampling_session_id"], 0))
            policy = on_base(base.weights, root / saved.removeprefix("tinker://"))
            for reply in found:
                for sequence in reply["sequences"]:
                    own = token_logprobs(policy, PROMPT + sequence["tokens"])
                    assert sequence["logprobs"] == pytest.approx(own[len(PROMPT) - 1 :], abs=1e-3)
                    assert reply["prompt_logprobs"][1:] == pytest.approx(own[: len(PROMPT) - 1], abs=1e-3)
            plain = token_logprobs(on_base(base.weights, None), PROMPT)
            assert found[0]["prompt_logprobs"][1:] != pytest.approx(plain, abs=0.05)
            client.post(f"sessions/{client.session}/finish", reason={"type": "success"})

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    with Client(address) as client:
        made = client.post(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model="tiny"
        )
        found = sample(client, made["sampling_session_id"], 0, max_tokens=None)
        own = token_logprobs(on_base(base.weights, None), PROMPT + found["sequences"][0]["tokens"])
        assert found["sequences"][0]["logprobs"] == pytest.approx(own[len(PROMPT) - 1 :], abs=1e-3)
        assert all(len(each["tokens"]) > 16 or each["stop_reason"] == "stop" for each in found["sequences"])
