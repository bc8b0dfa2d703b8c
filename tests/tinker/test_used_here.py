"""Checkpoints whose weights are on a server, used here: art check, export and serve of a run that trained there."""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import (
    EmbeddedEngineConfig,
    LoraConfig,
    ModelConfig,
    TinkerEngineConfig,
    TinkerLearnerConfig,
    TorchLearnerConfig,
    TrainConfig,
)
from art_cli.engines import make_engine
from art_cli.learners import LearnerSetup
from art_cli.models.adapters import on_base
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.weights import token_logprobs
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.serving.merged_export import load_source
from art_cli.serving.served_model import find_source
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.tinker_learner import TinkerLearner
from tests.support.models.preset_groups import config_of, made_groups
from tests.support.paths import ROOT
from tests.support.servers.backend_server import serving, tiny_base

# the SDK leaves the connections of its first request open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
Art = Callable[..., tuple[int, str, str]]
IDS = [5, 6, 7, 8, 9]
LETTERS = ROOT / "tests/letters/config.yaml"


class Trained:
    """A checkpoint of a step on a server, and what the server says to some tokens."""

    def __init__(self, base: Base, address: str, directory: Path) -> None:
        self.base, self.address, self.path = base, address, directory / "step_0001"
        lora = None if base.is_whole else LoraConfig(rank=4)
        policy = on_base(base.weights, None)
        engine = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=30)
        train = TrainConfig(learning_rate=1e-2, max_logprob_gap=10.0)
        learner = TinkerLearner(
            spec_of(policy),
            LearnerSetup(train=train, loss=config_of("grpo"), learner=TinkerLearnerConfig(name="tinker")),
            engine=engine,
            lora=lora,
        )
        before = learner.score(IDS)
        learner.step(made_groups(policy))
        self.scores = learner.score(IDS)
        assert self.scores != before
        with new_checkpoint(self.path, Manifest(step=1, base=base.weights.base, config_hash="")) as made:
            learner.save(made)
        learner.close()


@pytest.fixture(params=[False, True], ids=["adapter", "all weights"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trained]:
    tiny = tiny_base(tmp_path / "tiny")
    base = Base(tiny.weights, name="tiny", lora=None, learner=TorchLearnerConfig(), is_whole=request.param)
    with serving(base, tmp_path / "backend") as address:
        yield Trained(base, address, tmp_path / "run")
    gc.collect()


@pytest.mark.slow
def test_an_export_is_the_model_that_the_server_trained(trained: Trained, tmp_path: Path, art: Art) -> None:
    code, _, errors = art("export", trained.path, "-o", tmp_path / "merged", "--dtype", "float32")
    assert code == 0, errors

    made = load_weights(
        ModelConfig(base=str(tmp_path / "merged"), lora=None, dtype="float32"), str(tmp_path / "merged")
    )
    assert token_logprobs(made, IDS) == pytest.approx(trained.scores, abs=1e-4)


@pytest.mark.slow
def test_what_is_served_has_the_weights_that_the_server_trained(trained: Trained, tmp_path: Path) -> None:
    """The source that `art serve` opens, in the embedded engine: its logprobs, and a reply."""
    weights = load_source(find_source(str(trained.path)), "float32")

    async def score() -> list[float]:
        engine = make_engine(EmbeddedEngineConfig(), weights, name="p", logs=tmp_path, shares_weights=False)
        await engine.start()
        try:
            messages = [{"role": "user", "content": "say letters"}]
            reply = await engine.backend.reply(Request(model="p", messages=messages, sampling=Sampling(max_tokens=5)))
            assert 1 <= len(reply.choices[0].token_ids) <= 5
            return await engine.score(IDS)
        finally:
            await engine.close()

    assert asyncio.run(score()) == pytest.approx(trained.scores, abs=1e-4)


@pytest.mark.slow
def test_a_preflight_asks_the_server(tmp_path: Path, art: Art) -> None:
    """Found: the base model there, and its context. Not found: one line says what is wrong with the address."""
    with serving(tiny_base(tmp_path / "tiny"), tmp_path / "backend") as address:
        chosen = ["engine=tinker", "learner=tinker", "engine.base_model=tiny", f"runs={tmp_path}"]
        code, out, errors = art("check", LETTERS, "--json", f"engine.url={address}", *chosen)
        found = json.dumps(json.loads(out)) + errors
        assert code == 0 and address in found and "tokens of context" in found, found
        code, out, errors = art("check", LETTERS, "--json", "engine.url=http://127.0.0.1:9", *chosen)
        assert code == 1 and "nothing answers" in out + errors
    gc.collect()


@pytest.mark.slow
def test_a_small_adapter_goes_on_at_a_server_that_takes_no_larger_ones(tmp_path: Path) -> None:
    """The SDK names no rank where it goes on from a saved state, and the protocol's is 32."""
    base = Base(tiny_base(tmp_path / "tiny").weights, name="tiny", lora=None, learner=TorchLearnerConfig())
    with serving(base, tmp_path / "backend", limits=BackendLimits(rank=8)) as address:
        trained = Trained(base, address, tmp_path / "run")
        engine = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=30)
        policy = spec_of(on_base(base.weights, None))
        learner = TinkerLearner(
            policy,
            LearnerSetup(
                train=TrainConfig(learning_rate=1e-2),
                loss=config_of("grpo"),
                learner=TinkerLearnerConfig(name="tinker"),
            ),
            engine=engine,
            lora=LoraConfig(rank=4),
        )
        learner.load(trained.path)
        assert learner.score(IDS) == pytest.approx(trained.scores, abs=1e-5)
        learner.close()
    gc.collect()
