"""The supervised warm-up: saved regularly, resumed bit for bit, stopped by Ctrl-C, and shared."""

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import GrpoConfig, SftConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop import warm_up
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS
from tests.support.processes import forked

CONFIG = LETTERS / "config.yaml"
ADAPTER, MOMENTS = "adapter_model.safetensors", "sft/optimizer.safetensors"
DEMOS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": n * 4}]} for n in "abcdefg"
]

# Written into sitecustomize.py: warm-ups are saved often, and are slow enough to be killed on any machine.
SLOW = """
import time
from art_cli.loop import warm_up
warm_up.SAVE_EVERY_S, warm_up.SAVE_SHARE, warm_up.TAKE_S = 0.1, 10.0, 0.0
take = warm_up.WarmUp.take
warm_up.WarmUp.take = lambda *args: (time.sleep(0.03), take(*args))
"""

Art = Callable[..., tuple[int, str, str]]


def new_learner() -> TorchLearner:
    section = SftConfig(demos="", learning_rate=1e-2, batch_size=3, epochs=3, warmup_steps=4)
    return TorchLearner(
        tiny_weights(),
        LearnerSetup(
            train=TrainConfig(learning_rate=1e-5), loss=GrpoConfig(), learner=TorchLearnerConfig(), sft=section
        ),
    )


def settings(runs: Path, epochs: int, *more: str) -> list[str]:
    runs.mkdir(exist_ok=True)
    (runs / "demos.jsonl").write_text("".join(json.dumps(demo) + "\n" for demo in DEMOS))
    own = [f"+sft.demos={runs / 'demos.jsonl'}", f"+sft.epochs={epochs}", "+sft.learning_rate=1e-3"]
    return [f"runs={runs}", *own, "+sft.batch_size=2", "train.steps=1", "eval=null", *more]


def start_of(runs: Path, name: str = "letters") -> bytes:
    return (RunDir(runs / name).checkpoint_path(0) / ADAPTER).read_bytes()


def train_here(runs: Path, epochs: int, *more: str) -> bytes:
    """The adapter that training starts from."""
    loaded = load_config(CONFIG, settings(runs, epochs, *more))
    asyncio.run(train(loaded))
    return start_of(runs, loaded.config.name)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 3, 5, 8])
def test_a_warm_up_that_is_gone_on_with_anywhere_ends_bit_for_bit_the_same(cut: int, tmp_path: Path) -> None:
    """9 updates, 3 an epoch, cut in and between epochs: the same weights, moments and numbers, but for the seconds."""
    whole, first, second = new_learner(), new_learner(), new_learner()
    assert whole.begin_sft(DEMOS) == first.begin_sft(DEMOS) == second.begin_sft(DEMOS) == 9
    numbers = whole.take_sft(9).numbers
    first.take_sft(cut)
    for directory in ("cut", "one", "two"):
        (tmp_path / directory).mkdir()
    first.save(tmp_path / "cut")
    second.load(tmp_path / "cut")
    again = second.take_sft(99).numbers
    whole.save(tmp_path / "one")
    second.save(tmp_path / "two")
    for name in (ADAPTER, MOMENTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert {**again, "train_s": 0.0} == {**numbers, "train_s": 0.0}


def test_a_warm_up_ended_leaves_no_state_in_a_checkpoint(tmp_path: Path) -> None:
    learner = new_learner()
    learner.begin_sft(DEMOS)
    learner.take_sft(2)
    learner.end_sft()
    learner.save(tmp_path)
    assert not (tmp_path / "sft").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_warm_up_killed_and_interrupted_goes_on_and_ends_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL and then SIGINT, each at a random instant after a state was saved; SIGINT is answered in seconds."""
    caplog.set_level(logging.INFO)
    draw, epochs = random.Random(11), 24
    wanted = train_here(tmp_path / "whole", epochs)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    words = ["train", CONFIG, *settings(tmp_path / "cut", epochs)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for number in (signal.SIGKILL, signal.SIGINT):
        done = newest_saved(tmp_path / "cut")  # including the killed process's final save
        with forked.Forked(words, stderr=forked.PIPE, env=environment) as process:
            assert process.stderr is not None
            wait_for_more(tmp_path / "cut", done, process)
            time.sleep(draw.uniform(0, 0.3))
            begin = time.monotonic()
            process.send_signal(number)
            rest = process.stderr.read()
            assert process.wait(timeout=60) == (130 if number == signal.SIGINT else -number), rest
            assert time.monotonic() - begin < 20
    assert "continue with: art train" in rest
    assert "Traceback" not in rest
    caplog.clear()
    assert train_here(tmp_path / "cut", epochs) == wanted
    assert "sft: continues from update " in caplog.text


def newest_saved(runs: Path) -> int:
    """The newest saved update of the one warm-up there, 0 for none."""
    return max((int(path.name[5:]) for path in runs.glob(".warm/*/checkpoints/step_*")), default=0)


def wait_for_more(runs: Path, done: int, process: forked.Forked) -> None:
    """Until an update past `done` is saved."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, "ended before it was to be killed"
        if newest_saved(runs) > done:
            return
        time.sleep(0.02)
    raise AssertionError("no state was saved")


@pytest.mark.slow
def test_two_runs_share_one_warm_up_and_another_setting_makes_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = train_here(tmp_path, 2)
    assert "taken from" not in caplog.text
    assert train_here(tmp_path, 2, "name=other", "train.learning_rate=1e-3") == first
    assert "taken from" in caplog.text
    lines = [[line for line in RunDir(tmp_path / n).metrics() if line.split == "sft"] for n in ("letters", "other")]
    assert lines[0][0].metrics == lines[1][0].metrics
    assert train_here(tmp_path, 3, "name=third") != first
    assert len(list((tmp_path / ".warm").iterdir())) == 2


@pytest.mark.slow
def test_a_damaged_warm_up_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = train_here(tmp_path, 2)
    [path] = tmp_path.glob(f".warm/*/checkpoints/*/{ADAPTER}")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "letters")
    assert train_here(tmp_path, 2) == first
    assert "does not match its hash" in caplog.text


@pytest.mark.slow
def test_progress_is_told_off_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warm_up, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(warm_up, "TAKE_S", 0.01)
    train_here(tmp_path, 3)
    lines = [record.message for record in caplog.records if record.message.startswith("sft: update ")]
    assert len(lines) >= 2
    assert lines[-1].startswith("sft: update 12 of 12 (100 %)  loss ") and lines[-1].endswith(" s left")


@pytest.mark.slow
def test_art_sft_makes_a_warm_up_once_and_begins_where_a_checkpoint_stands(art: Art, tmp_path: Path) -> None:
    """Repeating the command reuses the result; --checkpoint makes a different warm-up."""
    common = settings(tmp_path, 2)
    for place, more in (("a", []), ("b", []), ("c", ["--checkpoint", tmp_path / "a"])):
        code, _, err = art("sft", CONFIG, tmp_path / "demos.jsonl", *common, "-o", tmp_path / place, *more)
        assert code == 0
        assert ("taken from" in err) == (place == "b")
    a, b, c = ((tmp_path / place / ADAPTER).read_bytes() for place in "abc")
    assert a == b != c


@pytest.mark.slow
def test_a_second_process_waits_for_the_first_ones_warm_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is released at the second check: the waiting process continues and logs why it waited."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warm_up, "WAIT_S", 0.05)
    first = train_here(tmp_path, 2)
    [home] = (tmp_path / ".warm").iterdir()
    code = (
        "import pathlib, sys\nfrom art_cli.runs.run_dir import RunDir\nwith RunDir(pathlib.Path(sys.argv[1])).lock():\n"
        " print('held', flush=True)\n sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as holder:
        stdin, stdout = holder.stdin, holder.stdout
        assert stdin is not None and stdout is not None
        assert stdout.readline() == b"held\n"

        async def both() -> None:
            second = asyncio.create_task(train(load_config(CONFIG, settings(tmp_path, 2, "name=second"))))
            while "another process makes the same warm-up" not in caplog.text:
                assert not second.done()
                await asyncio.sleep(0.02)
            stdin.write(b"\n")
            stdin.flush()
            await second

        asyncio.run(both())
    assert start_of(tmp_path, "second") == first
