"""Several replicas in one vLLM server: startup, and a weight proof for each replica.

Against a fake server (fake_vllm.py), a real process over real HTTP; test_vllm_real.py has two real replicas.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from art_cli.config.schema import VllmEngineConfig
from art_cli.engines.proof import WeightProof
from art_cli.engines.vllm import arguments
from art_cli.runs.manifest import Probe
from art_cli.runtime.errors import DriftError, EngineError
from tests.engines.test_vllm import PROBE, Fake, flags
from tests.support.standins import fake_vllm


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_replicas_are_ranks_of_one_server() -> None:
    assert "--data-parallel-size" not in flags()
    assert " --data-parallel-size 2" in " ".join(flags(replicas=2))
    assert " --data-parallel-size 6" in " ".join(flags(replicas=2, args={"data_parallel_size": 3}))


def test_too_few_gpus_are_refused() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "2,3,5,7"}
    settings: dict[str, Any] = {"name": "vllm", "env": env, "args": {"tensor_parallel_size": 2}}
    arguments.check_gpus(VllmEngineConfig.model_validate({**settings, "replicas": 2}))
    with pytest.raises(EngineError, match=r"engine\.replicas: 3 of 2 GPUs each need 6, and 4 can be seen"):
        arguments.check_gpus(VllmEngineConfig.model_validate({**settings, "replicas": 3}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": 2, "url": "http://a:1"}, "remove replicas"),
        ({"replicas": 0}, "greater than 0"),
        ({"url": []}, "is one server"),
        ({"url": ["http://a:1", "http://b:1"]}, "is one server"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        VllmEngineConfig.model_validate({"name": "vllm", **changes})


def test_a_list_of_one_address_is_that_address() -> None:
    assert VllmEngineConfig.model_validate({"name": "vllm", "url": ["http://a:1"]}).base_url == "http://a:1"


async def test_every_replica_scores_the_probe(fake: Fake) -> None:
    async with fake.running(replicas=2) as engine:
        await engine.load(fake.adapter("a"), 3)
        assert fake.paths().count("/v1/load_lora_adapter") == 1
        seed = fake_vllm.seed_of(fake.adapter("a"))
        expected = [fake_vllm.logprobs(seed, b)[t] for b, t in zip(PROBE, PROBE[1:], strict=False)]
        assert await engine.score(PROBE) == pytest.approx(expected)
        ranks = [call["rank"] for call in fake.calls() if call.get("path") == "/v1/completions"]
        assert ranks == ["0", "0", "1", "1"]  # through the prefix cache, and without it


async def test_a_replica_with_other_weights_stops_the_run(fake: Fake) -> None:
    async with fake.running("ranks differ", replicas=2) as engine:
        await engine.load(fake.adapter("a"), 3)
        found = await engine.score_replicas(PROBE)
        assert found[0] == await engine.score(PROBE)
        with pytest.raises(DriftError, match=r"step 3: vLLM's replica 2 does not sample from the learner's weights"):
            WeightProof().check(found, Probe(tokens=PROBE, logprobs=found[0]), dtype="float32", name="step 3")
