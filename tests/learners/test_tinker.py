"""The learner of a server of the Tinker protocol: the torch learner's steps, by the real SDK on a real server."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from art_cli.config.compose import load_config
from art_cli.config.schema import (
    LoraConfig,
    LossConfig,
    TinkerEngineConfig,
    TinkerLearnerConfig,
    TorchLearnerConfig,
    TrainConfig,
)
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.adapters import with_adapter
from art_cli.models.policy_spec import spec_of
from art_cli.models.weights import Weights
from art_cli.runs.durable import lock_directory, write_lines
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_checkpoints import fetched
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import CheckpointError, ConfigError, DriftError, LearnerError, RemoteError
from art_cli.tinker.client.remote_checkpoint import read_remote
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.tinker_learner import TinkerLearner
from tests.support.models.preset_groups import config_of, made_groups
from tests.support.paths import ROOT
from tests.support.servers.backend_server import serving, tiny_base

LORA = LoraConfig(rank=4)
# the SDK leaves the connections of its first request open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CLAIMED = ["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "maxrl", "reinforce++", "gdpo", "gigpo"]


@pytest.fixture(scope="module", autouse=True)
def sockets() -> Iterator[None]:
    """Collects the sockets that the SDK leaves open while this module's filter of warnings holds."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(base, tmp_path_factory.mktemp("backend")) as address:
        yield address


def policy(base: Base) -> Weights:
    return with_adapter(base.weights, LORA, 0)


@pytest.fixture(scope="module")
def groups(base: Base) -> list[list[ScoredTrajectory]]:
    return made_groups(policy(base))


def settings(**knobs: Any) -> TrainConfig:
    return TrainConfig(**{"learning_rate": 1e-3, "max_logprob_gap": 10.0, "epochs_per_step": 2, **knobs})


def remote(base: Base, address: str, loss: LossConfig, **knobs: Any) -> TinkerLearner:
    engine = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=30)
    return TinkerLearner(
        spec_of(policy(base)),
        LearnerSetup(
            train=settings(**knobs), loss=loss, learner=TinkerLearnerConfig(name="tinker"), sampling_max_tokens=16
        ),
        engine=engine,
        lora=LORA,
    )


def local(base: Base, loss: LossConfig, **knobs: Any) -> TorchLearner:
    return TorchLearner(
        policy(base),
        LearnerSetup(train=settings(**knobs), loss=loss, learner=TorchLearnerConfig(), sampling_max_tokens=16),
    )


def saved(learner: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a learner's checkpoint; those of a server are downloaded."""
    with new_checkpoint(directory, Manifest(step=1, base="x", config_hash="")) as made:
        learner.save(made)
    return load_file(fetched(directory) / "adapter_model.safetensors")


def gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMED)
def test_steps_are_those_of_the_torch_learner(
    name: str, base: Base, address: str, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """A step of two epochs of two optimizer steps: adapters equal within 1e-6, and so are the numbers told.

    With grpo two steps, because schedule and clipping go on from one to the next.
    """
    knobs = {"updates_per_step": 2, "weight_decay": 0.1, "warmup_steps": 3, "clip_to_history": 2.0}
    echo = {"echo": 0.1}
    theirs, ours = (
        remote(base, address, config_of(name, **echo), **knobs),
        local(base, config_of(name, **echo), **knobs),
    )
    for _ in range(2 if name == "grpo" else 1):
        found, expected = theirs.step(groups).known(), ours.step(groups).known()
    assert gap(saved(theirs, tmp_path / "theirs"), saved(ours, tmp_path / "ours")) < 1e-6
    theirs.close()
    assert found.keys() == expected.keys() - {"entropy", "packed", "logprob_change"}
    for metric in found.keys() - {"train_s", "tokens_computed"}:
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric


@pytest.mark.slow
def test_a_step_that_broke_off_is_taken_again_from_the_last_checkpoint(
    base: Base, address: str, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """A gradient that was never applied, an update that was never saved, and a process that was killed: each is undone
    by going on from the last checkpoint, also elsewhere. At the end two steps are done, as by the torch learner."""
    loss = config_of("grpo")
    home = tmp_path / "checkpoints"
    theirs, ours = remote(base, address, loss), local(base, loss)
    theirs.step(groups)
    saved(theirs, home / "first")
    trainer, types = theirs.trainer.client, theirs.trainer.types
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [5.0] * 3},
    )
    trainer.forward_backward([datum], "cross_entropy").result()
    resumed = remote(base, address, loss)  # the killed one is not closed
    with lock_directory(tmp_path, tmp_path / "lock"):  # else its adapter may be that of a run that goes on
        resumed.load(home / "first")
    resumed.step(groups)  # never saved
    again = remote(base, address, loss)
    again.load(home / "first")
    again.step(groups)
    found = saved(again, home / "second")
    for _ in range(2):
        ours.step(groups)
    assert gap(found, saved(ours, tmp_path / "ours")) < 1e-6
    with pytest.raises(RemoteError, match="no longer has this run"):  # the server has unloaded the killed one's adapter
        theirs.score([1, 2, 3])
    again.close()


@pytest.mark.slow
def test_after_a_failure_the_weights_are_those_of_the_last_checkpoint(
    base: Base, address: str, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """Logprobs of another policy stop the step after its first gradient; nothing of it is left."""
    wrong = [[_shifted(each) for each in group] for group in groups]
    learner = remote(base, address, config_of("grpo"), max_logprob_gap=0.5)
    before = saved(learner, tmp_path / "before")
    with pytest.raises(DriftError, match="do not hold the same weights"):
        learner.step(wrong)
    assert gap(saved(learner, tmp_path / "after"), before) == 0
    learner.close()


def _shifted(trajectory: ScoredTrajectory) -> ScoredTrajectory:
    turns = []
    for turn in trajectory.turns:
        shifted = [value - 1.0 for value in turn.logprobs]
        turns.append(msgspec.structs.replace(turn, logprobs=shifted, raw_logprobs=shifted))
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.slow
def test_tokens_of_a_cut_distribution_are_compared_with_the_learners_own_logprobs(
    base: Base, address: str, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """As by the torch learner; those of another temperature are refused by name."""
    cut = [[_with_turns(each, top_p=0.9) for each in group] for group in groups]
    theirs, ours = remote(base, address, config_of("dapo")), local(base, config_of("dapo"))
    theirs.step(cut), ours.step(cut)
    assert gap(saved(theirs, tmp_path / "theirs"), saved(ours, tmp_path / "ours")) < 1e-6
    with pytest.raises(LearnerError, match="sampled at temperature 0.5"):
        theirs.step([[_with_turns(each, temperature=0.5) for each in group] for group in groups])
    theirs.close()


def _with_turns(trajectory: ScoredTrajectory, **changed: Any) -> ScoredTrajectory:
    turns = [msgspec.structs.replace(turn, **changed) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.slow
def test_sdk_0_24_1_takes_the_same_steps(
    base: Base, address: str, groups: list[list[ScoredTrajectory]], tmp_path: Path
) -> None:
    """In a process that has it: a step, a resume by another learner, a step, a sample."""
    packages = Path(os.environ.get("ART_TINKER_OLD", ROOT / ".sdk-tinker"))
    if not (packages / "tinker").is_dir():
        pytest.skip("the SDK 0.24.1 is not installed: make setup-tinker")
    write_lines(tmp_path / "scored.jsonl", [each for group in groups for each in group])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.servers.tinker_walk", address, base.weights.base, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{packages}:{ROOT}", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "0.24.1" and found["sampled"] > 0
    ours = local(base, config_of("grpo"))
    for _ in range(2):
        ours.step(groups)
    theirs = load_file(fetched(tmp_path / "checkpoints" / "step_0002") / "adapter_model.safetensors")
    assert gap(theirs, saved(ours, tmp_path / "ours")) < 1e-6


# --- what is refused, and what fails ----------------------------------------------------------------------------------

REFUSED = {
    "loss.kl=0.1": "loss.kl: cannot be expressed",
    "loss.off_policy={name: truncate}": "loss.off_policy: cannot be expressed",
    "loss=ppo": "needs more of the model",
    "train.max_kl=0.1": "train.max_kl: draws weights back",
    "model.quantize=4bit": "leaves the base model to the server",
    "rollout.sampling.temperature=0.7": "logprobs at 1 only",
    "learner=torch": "set both",
    "engine=embedded": "set engine=tinker",
    "engine.url=http://user:secret@host": "engine.url",
}


@pytest.mark.slow
@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_said_to_a_server_is_refused_at_load(override: str) -> None:
    from art_cli.loop.references import check_ready

    chosen = ["engine=tinker", "engine.url=http://127.0.0.1:9", "learner=tinker"]
    if override == "engine=embedded":
        chosen = ["learner=tinker"]
    with pytest.raises(ConfigError, match=REFUSED[override]):
        check_ready(load_config(ROOT / "tests/letters/config.yaml", [*chosen, override]), is_training=True)


@pytest.mark.slow
def test_faults_are_one_line_each_and_show_no_key(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[list[ScoredTrajectory]]
) -> None:
    """Nothing listens; another server; a wrong key, none, one that the SDK does not take; another base; gone midway."""

    def fault(address: str, **knobs: Any) -> str:
        engine = TinkerEngineConfig(name="tinker", url=address, **{"base_model": "tiny", "timeout_s": 2.0, **knobs})
        with pytest.raises(RemoteError) as caught:
            TinkerLearner(
                spec_of(policy(base)),
                LearnerSetup(train=settings(), loss=config_of("grpo"), learner=TinkerLearnerConfig(name="tinker")),
                engine=engine,
                lora=LORA,
            ).score([1, 2, 3])
        assert "\n" not in str(caught.value) and "tml-wrong" not in str(caught.value)
        return str(caught.value)

    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert "nothing answers" in fault("http://127.0.0.1:9")
    assert "TINKER_API_KEY is not set" in fault("http://gpu.invalid:8100")
    with serving(base, tmp_path / "keyed", keys=("tml-right",)) as address:
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        assert "refused the key; set the environment variable TINKER_API_KEY" in fault(address)
        monkeypatch.setenv("TINKER_API_KEY", "wrong")
        assert "only keys that begin with tml-" in fault(address)
        monkeypatch.setenv("TINKER_API_KEY", "tml-right")
        assert "no base model 'other'; it has: 'tiny'" in fault(address, base_model="other")
        learner = remote(base, address, config_of("grpo"))
        learner.trainer.timeout_s = 2.0
        learner.score([1, 2, 3])
    with pytest.raises(RemoteError, match="was not there within 2 s|connection was lost"):
        learner.step(groups)


def test_a_damaged_or_foreign_checkpoint_is_named(base: Base, address: str, tmp_path: Path) -> None:
    learner = remote(base, address, config_of("grpo"))
    saved(learner, tmp_path / "good")
    with pytest.raises(CheckpointError, match="no remote.json"):
        learner.load(tmp_path)
    remote_file = tmp_path / "bad" / "remote.json"
    remote_file.parent.mkdir()
    remote_file.write_text(json.dumps({"url": address, "base_model": "tiny", "state": "/etc/passwd", "sampler": "x"}))
    with pytest.raises(CheckpointError, match="not a path of the Tinker protocol"):
        learner.load(remote_file.parent)
    state = read_remote(tmp_path / "good").state.rpartition("/")[0] + "/gone"
    remote_file.write_text(json.dumps({"url": address, "base_model": "tiny", "state": state, "sampler": state}))
    with pytest.raises(RemoteError, match="gone"):
        learner.load(remote_file.parent)
    learner.close()


def test_a_key_is_sent_to_no_server_that_only_a_checkpoint_names(
    base: Base, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = remote(base, address, config_of("grpo"))
    saved(learner, tmp_path / "mine")
    monkeypatch.setattr(httpx, "Client", None)  # nothing may be asked
    found = read_remote(tmp_path / "mine")
    theirs = tmp_path / "theirs"
    with new_checkpoint(theirs, Manifest(step=1, base="x", config_hash="")) as made:
        (made / "remote.json").write_bytes(msgspec.json.encode({**msgspec.to_builtins(found), "url": "http://evil:1"}))
    with pytest.raises(RemoteError, match="set TINKER_BASE_URL=http://evil:1"):
        fetched(theirs)
    learner.trainer._connection = None


@pytest.mark.slow
def test_learner_and_schedule_need_no_torch() -> None:
    """Nothing that the learner imports before it opens a connection is torch."""
    program = "import sys, art_cli.tinker.tinker_learner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
