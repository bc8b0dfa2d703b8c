"""Given the same trajectories, a server computes the bits of the torch learner: steps, warm-ups, whole weights."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from art_cli.config.schema import (
    LoraConfig,
    LossConfig,
    ModelConfig,
    SftConfig,
    TinkerEngineConfig,
    TinkerLearnerConfig,
    TorchLearnerConfig,
    TrainConfig,
)
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.adapters import with_adapter
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.weights import Weights
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_checkpoints import fetched
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError, RemoteError
from art_cli.tinker.client.remote_checkpoint import LEASE_FILE
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.tinker_learner import TinkerLearner
from tests.support.models.preset_groups import config_of, made_groups
from tests.support.servers.backend_server import serving, tiny_base

# the SDK leaves the connections of its first request open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SAME_BITS = ["grpo", "dr_grpo", "dapo", "cispo", "maxrl", "reinforce++", "gdpo", "gigpo"]
RATE = 1e-2  # AdamW moves each weight by about the rate, whatever its gradient, so that rounding would be seen
Tensors = dict[str, torch.Tensor]


class Side:
    """One base, its server, and learners of both kinds on it."""

    def __init__(self, base: Base, address: str) -> None:
        self.base, self.address = base, address
        self.lora = None if base.is_whole else LoraConfig(rank=4)

    def weights(self) -> Weights:
        if self.lora is None:
            return load_weights(
                ModelConfig(base=self.base.weights.base, lora=None, dtype="float32"), self.base.weights.base
            )
        return with_adapter(self.base.weights, self.lora, 0)

    def local(self, loss: LossConfig, *, sft: SftConfig | None = None, **knobs: Any) -> TorchLearner:
        return TorchLearner(
            self.weights(),
            LearnerSetup(train=train(knobs), loss=loss, learner=TorchLearnerConfig(), sft=sft, sampling_max_tokens=16),
        )

    def remote(self, loss: LossConfig, *, sft: SftConfig | None = None, **knobs: Any) -> TinkerLearner:
        engine = TinkerEngineConfig(name="tinker", url=self.address, base_model="tiny", timeout_s=30)
        return TinkerLearner(
            spec_of(self.weights()),
            LearnerSetup(
                train=train(knobs),
                loss=loss,
                learner=TinkerLearnerConfig(name="tinker"),
                sft=sft,
                sampling_max_tokens=16,
            ),
            engine=engine,
            lora=self.lora,
        )


def train(knobs: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**{"learning_rate": RATE, "max_logprob_gap": 10.0, "epochs_per_step": 2, **knobs})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    base = tiny_base(tmp_path_factory.mktemp("tiny"))
    with serving(base, tmp_path_factory.mktemp("backend")) as address:
        yield Side(base, address)
    gc.collect()  # the sockets that the SDK leaves open, while this module's filter of warnings holds


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    tiny = tiny_base(tmp_path_factory.mktemp("tiny"))
    base = Base(tiny.weights, name="tiny", lora=None, learner=TorchLearnerConfig(), is_whole=True)
    with serving(base, tmp_path_factory.mktemp("backend")) as address:
        yield Side(base, address)
    gc.collect()


@pytest.fixture(scope="module")
def groups(adapters: Side) -> list[list[ScoredTrajectory]]:
    return made_groups(adapters.weights())


def saved(learner: Any, directory: Path) -> Tensors:
    named = re.fullmatch(r"step_(\d+)", directory.name)
    with new_checkpoint(directory, Manifest(step=int(named[1]) if named else 1, base="x", config_hash="")) as made:
        learner.save(made)
    found = fetched(directory)
    name = "adapter_model.safetensors" if (found / "adapter_model.safetensors").is_file() else "model.safetensors"
    return load_file(found / name)


def differing(left: Tensors, right: Tensors) -> int:
    """The number of values that are not the same."""
    assert left.keys() == right.keys()
    return sum(int((left[name] != right[name]).sum()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_BITS)
def test_steps_give_the_same_bits(
    name: str, adapters: Side, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """Two steps of two epochs of two optimizer steps at a rate of 1e-2: no value of the adapter differs."""
    theirs, ours = (make(config_of(name), updates_per_step=2) for make in (adapters.remote, adapters.local))
    for _ in range(2):
        theirs.step(groups), ours.step(groups)
    start, found = saved(adapters.local(config_of(name)), tmp_path / "start"), saved(theirs, tmp_path / "theirs")
    assert differing(found, start) > 0
    assert differing(found, saved(ours, tmp_path / "ours")) == 0
    theirs.close()


@pytest.mark.slow
def test_a_server_that_knows_no_further_numbers_gets_none(
    adapters: Side, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """Then the rows of prompts are computed too, and the adapters are near each other: as with servers elsewhere."""
    theirs, ours = (make(config_of("cispo"), learning_rate=1e-3) for make in (adapters.remote, adapters.local))
    assert theirs.trainer.session is not None
    theirs.trainer._extra = frozenset()
    theirs.step(groups), ours.step(groups)
    found, expected = saved(theirs, tmp_path / "theirs"), saved(ours, tmp_path / "ours")
    assert 0 < max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-5
    theirs.close()


# --- the warm-up ------------------------------------------------------------------------------------------------------

DEMOS = [
    {"messages": [{"role": "user", "content": f"{number} + 1"}, {"role": "assistant", "content": f"{number + 1}"}]}
    for number in range(7)
]
SFT = {"demos": "demos.jsonl", "learning_rate": RATE, "batch_size": 2, "epochs": 2, "warmup_steps": 2}


def warm(learner: Any, *, evaluated: int = 0, at_once: int = 3) -> Any:
    """Takes the whole warm-up, some updates at once. Its last progress."""
    learner.begin_sft(DEMOS[evaluated:], DEMOS[:evaluated])
    while not (taken := learner.take_sft(at_once)).is_done:
        pass
    learner.end_sft()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"eval_every": 2, "patience": 1, "epochs": 4, "learning_rate": 0.3}])
def test_a_warm_up_gives_the_same_bits_and_numbers(
    adapters: Side, groups: list[list[ScoredTrajectory]], tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """Also one that an evaluation stops early, and the step after it, whose optimizer is new."""
    sft = SftConfig.model_validate({**SFT, **knobs})
    theirs, ours = (make(config_of("grpo"), sft=sft) for make in (adapters.remote, adapters.local))
    found, expected = (warm(each, evaluated=2 if knobs else 0) for each in (theirs, ours))
    assert found.numbers.keys() == expected.numbers.keys()
    for name in found.numbers.keys() - {"train_s", "eval_s", "tokens_computed"}:
        assert found.numbers[name] == pytest.approx(expected.numbers[name], rel=1e-5), name
    assert differing(saved(theirs, tmp_path / "theirs"), saved(ours, tmp_path / "ours")) == 0
    theirs.step(groups), ours.step(groups)
    assert differing(saved(theirs, tmp_path / "theirs1"), saved(ours, tmp_path / "ours1")) == 0
    theirs.close()


@pytest.mark.slow
def test_a_warm_up_that_was_killed_goes_on_from_its_last_save(adapters: Side, tmp_path: Path) -> None:
    """The optimizer's moments and the place in the batches go on; what was not saved is done again, once."""
    sft, home = SftConfig.model_validate(SFT), tmp_path / "checkpoints"
    killed, ours = (make(config_of("grpo"), sft=sft) for make in (adapters.remote, adapters.local))
    killed.begin_sft(DEMOS)
    killed.take_sft(3)
    saved(killed, home / "step_0003")
    killed.take_sft(2)  # never saved
    again = adapters.remote(config_of("grpo"), sft=sft)
    again.begin_sft(DEMOS)
    again.load(home / "step_0003")
    assert again.take_sft(100).is_done
    again.end_sft()
    warm(ours)
    assert differing(saved(again, home / "step_0008"), saved(ours, tmp_path / "ours")) == 0
    again.close()


@pytest.mark.slow
def test_a_finished_warm_up_belongs_to_no_run(adapters: Side, tmp_path: Path) -> None:
    """Its directory names no adapter in training, because another run that takes the result would have it unloaded."""
    learner = adapters.remote(config_of("grpo"), sft=SftConfig.model_validate(SFT))
    warm(learner)
    saved(learner, tmp_path / "warm" / "checkpoints" / "step_0008")
    assert not (tmp_path / "warm" / "checkpoints" / LEASE_FILE).exists()
    saved(learner, tmp_path / "run" / "checkpoints" / "step_0000")
    assert (tmp_path / "run" / "checkpoints" / LEASE_FILE).exists()
    other = adapters.remote(config_of("grpo"), sft=SftConfig.model_validate(SFT))
    other.load(tmp_path / "warm" / "checkpoints" / "step_0008")
    assert learner.score([1, 2, 3]) == other.score([1, 2, 3])
    learner.close(), other.close()


def test_demos_that_cannot_be_trained_on_are_named(adapters: Side) -> None:
    learner = adapters.remote(config_of("grpo"), sft=SftConfig.model_validate(SFT))
    with pytest.raises(LearnerError, match="no examples"):
        learner.begin_sft([])
    with pytest.raises(LearnerError, match="demo 2"):
        learner.begin_sft([DEMOS[0], {"messages": [{"role": "user", "content": "only asked"}]}])


# --- whole weights ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whole_weights_are_trained_as_here(whole: Side, groups: list[list[ScoredTrajectory]], tmp_path: Path) -> None:
    """A warm-up, two steps, and a resume between them, on a server whose model.lora is null."""
    sft = SftConfig.model_validate({**SFT, "learning_rate": 1e-3})
    loss, knobs = config_of("grpo"), {"sft": sft, "learning_rate": 1e-3}
    theirs, ours = whole.remote(loss, **knobs), whole.local(loss, **knobs)
    warm(theirs), warm(ours)
    theirs.step(groups), ours.step(groups)
    assert differing(saved(theirs, tmp_path / "theirs"), saved(ours, tmp_path / "ours")) == 0
    again = whole.remote(loss, **knobs)
    again.load(tmp_path / "theirs")
    again.step(groups), ours.step(groups)
    found = saved(again, tmp_path / "again")
    assert differing(found, saved(ours, tmp_path / "ours1")) == 0
    assert differing(found, saved(whole.local(loss), tmp_path / "start")) > 0.9 * sum(map(torch.numel, found.values()))
    theirs.close(), again.close()


@pytest.mark.slow
def test_clients_of_one_server_have_whole_weights_of_their_own(
    whole: Side, groups: list[list[ScoredTrajectory]]
) -> None:
    trained, other = whole.remote(config_of("grpo")), whole.remote(config_of("grpo"))
    before = other.score([1, 2, 3, 4])
    trained.step(groups)
    assert other.score([1, 2, 3, 4]) == before != trained.score([1, 2, 3, 4])
    trained.close(), other.close()


def test_adapters_and_whole_weights_are_not_taken_for_each_other(adapters: Side, whole: Side) -> None:
    mixed = Side(whole.base, adapters.address)
    with pytest.raises(RemoteError, match="it trains adapters; set model.lora"):
        mixed.remote(config_of("grpo")).score([1, 2, 3])
    mixed = Side(adapters.base, whole.address)
    with pytest.raises(RemoteError, match="it trains all weights, no adapters: set model.lora=null"):
        mixed.remote(config_of("grpo")).score([1, 2, 3])


def test_an_alpha_that_the_server_does_not_read_is_told(adapters: Side, caplog: pytest.LogCaptureFixture) -> None:
    adapters.remote(config_of("grpo"))
    assert "model.lora.alpha" not in caplog.text
    adapters.lora, kept = LoraConfig(rank=4, alpha=8), adapters.lora
    try:
        adapters.remote(config_of("grpo"))
    finally:
        adapters.lora = kept
    assert "model.lora.alpha: the server sets the scale" in caplog.text
