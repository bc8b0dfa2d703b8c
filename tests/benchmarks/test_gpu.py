"""`make bench-gpu` on a CPU: every row runs with the tiny model, and its numbers can be true.

They are checked against the work: 2 prompts of 48 tokens, 4 attempts at each, 8 new tokens. The order, the deadline,
the end of the time, Ctrl-C and the next start are tried with rows that take no time.
"""

import json
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.config.schema import VllmEngineConfig
from art_cli.engines.vllm import arguments
from art_cli.models.policy_spec import spec_of
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.order import Order
from benchmarks.gpu.results import Measured, Results
from benchmarks.gpu.rows import PLAN, ROWS, Key, plan
from benchmarks.gpu.shapes import SHAPES
from tests.support.models.tiny import tiny_weights
from tests.support.others.real_vllm import IS_THERE
from tests.support.paths import ROOT
from tests.support.processes.waiting import wait_until

PROMPTS, ATTEMPTS, PROMPT, NEW = 2, 4, 48, 8
SAMPLED = PROMPTS * ATTEMPTS * NEW
GAP = 0.05  # nats of the tiny model; bfloat16 has 8 bits of mantissa, and engine and learner round differently
Small = dict[Key, dict[str, Any]]
# Rows that differ from another one by a setting: on a CPU the other one runs in their place.
SAME = {
    "loop-vllm": "loop-embedded",  # tests/engines/test_vllm_real.py trains a whole run with vLLM
    "loop-updates": "loop-embedded",
    "loop-trl-64": "loop-trl",
    "train-dense": "train-torch",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The last line of each row. Ctrl-C ends the first start, of three rows, and the second one goes on from there."""
    work = tmp_path_factory.mktemp("gpu")
    told = [sys.executable, "-m", "benchmarks.gpu", "--small", "--work", str(work), "--minutes", "13"]
    told += ["--shape", *(name for name in SHAPES if name != "small"), "--only"]
    path = work / "gpu.jsonl"
    first = [*told, "matmul", "sample-embedded", "train-torch"]  # two at a time, after the base; the first leaves two
    with subprocess.Popen(first, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as begun:
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 1, 300, while_running=begun)
        begun.send_signal(signal.SIGINT)
        printed = begun.communicate(timeout=120)[0]
    assert begun.returncode == 130 and path.read_bytes().count(b"\n") < 4, printed  # the base and some of the rows
    kept = json.loads(path.read_text().splitlines()[1])["row"]
    done = subprocess.run([*told, *(ROWS.keys() - SAME.keys())], cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0 and f"{kept}-small: kept" in done.stdout, done.stdout + done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    page = (work / "GPU.md").read_text()
    assert all(ROWS[line["row"]].what in page for line in lines) and ": interrupted" not in page
    return {Key(line["row"], line["shape"], line["dtype"]): line for line in lines}


def tiny(small: Small, row: str) -> dict[str, Any]:
    """The figures of a row with the tiny model. Skips the test if the row says what this machine lacks."""
    line = small[Key(row, "small")]
    if line["reason"] is not None:
        pytest.skip(line["reason"])
    found: dict[str, Any] = line["figures"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_has_numbers_or_says_what_is_missing(small: Small) -> None:
    assert small.keys() == {key for key in plan(is_small=True) if key.shape == "small" and key.row not in SAME}
    assert {key.row for key in small} == ROWS.keys() - SAME.keys()
    missing = {key: line["reason"] for key, line in small.items() if line["reason"] is not None}
    assert "only a GPU" in missing.pop(Key("loop-24gb", "small"))
    assert "Unsloth" in missing.pop(Key("train-unsloth", "small"), "Unsloth")
    if not IS_THERE:
        assert all("no Python with vLLM" in missing.pop(key) for key in [*missing] if "vllm" in ROWS[key.row].entry)
    assert not missing
    assert all(line["versions"]["torch"] and line["card"] == "CPU" for line in small.values())


@pytest.mark.parametrize("key", [key for key in PLAN if "vllm" in ROWS[key.row].entry])
def test_vllm_takes_the_rows_of_a_gpu(key: Key, tmp_path: Path) -> None:
    """A CPU's vLLM takes float32 too, a GPU's does not."""
    spec = msgspec.structs.replace(spec_of(tiny_weights()), dtype=key.dtype)
    given: dict[str, Any] = {"python": tmp_path, "port": 1, "name": "n", "template": None, "sleep": 1}
    assert key.dtype in arguments.command(VllmEngineConfig(name="vllm"), spec, has_gpu=True, **given)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ["sample-embedded", "server-vllm"])
def test_an_engine_samples_what_it_was_asked_for_with_the_learners_logprobs(small: Small, row: str) -> None:
    found = tiny(small, row)
    assert found["requests"] == PROMPTS * ATTEMPTS
    assert 0.9 * SAMPLED <= found["tokens"] <= SAMPLED  # a reply may end early
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert found["mfu"] > 0 and found["memory_gb"] > 0.1
    assert 0 <= found["gap"] < GAP and found["gap_tokens"] == pytest.approx(SAMPLED, rel=0.1)
    assert 0 <= found["probe_gap"] < GAP
    if row == "server-vllm":
        assert found["swap_moves"] > 10 * max(found["gap"], found["swap_returns"])  # another adapter, and back
        assert 0 < found["swap_s"] < found["start_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_step_counts_its_tokens_and_flex_attention_says_why_it_is_off(small: Small) -> None:
    for row in ("train-torch", "train-unsloth"):
        if small[Key(row, "small")]["reason"]:
            continue
        found = tiny(small, row)
        assert (found["tokens_trained"], found["tokens_flat"]) == (SAMPLED, PROMPTS * ATTEMPTS * (PROMPT + NEW))
        assert found["tokens_computed"] == PROMPTS * (PROMPT + ATTEMPTS * NEW) or not found["packed"]
        assert found["tokens_per_s"] == pytest.approx(found["tokens_flat"] / found["step_s"])
        assert found["mfu"] == pytest.approx(found["tflops"] / found["peak_tflops"])
        assert found["grad_norm"] > 0
    assert "backward on CPU" in tiny(small, "train-torch")["flex_reason"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_loops_play_the_same_number_of_attempts_and_tokens(small: Small) -> None:
    for row in [key.row for key, line in small.items() if key.row.startswith("loop-") and not line["reason"]]:
        found = tiny(small, row)
        assert found["attempts"] == PROMPTS * ATTEMPTS and found.get("failed", 0) == 0
        assert 0.9 * SAMPLED <= found["tokens"] <= SAMPLED
        assert found["step_s"] > 0 and 0 < found["reward"] < 1
        assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"])
        if ROWS[row].python != "trl":
            assert 0 <= found["gap"] < GAP and found["sample_s"] + found["train_s"] <= found["step_s_range"][1]
            assert found["updates"] == 1
            assert 0 <= found["probe_gap"] < GAP and found["first_reply_s"] > 0


# --- without a run ----------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> Measured:
    told: dict[str, Any] = {
        "row": "loop-vllm", "shape": "0.6b", "dtype": "bfloat16", "card": "NVIDIA X", "when": "2026-11-23 04:00",
        "seconds": 1.0, "versions": {"torch": "2.13.0"}, "figures": {"step_s": 2.0, "weights": "random"},
    }  # fmt: skip
    return Measured(**told | changes)


def test_every_row_names_its_function() -> None:
    for row in ROWS.values():
        module, _, function = row.entry.partition(":")
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), function))


# --- the order --------------------------------------------------------------------------------------------------------


def test_a_models_base_comes_before_its_rows_also_where_only_some_are_wanted() -> None:
    for keys in (plan(), plan(is_small=True), plan(rows=["loop-24gb", "loop-trl"]), plan(shapes=["8b"])):
        built: set[str] = set()
        for key in keys:
            built |= {key.shape} if key.row == "base" else set()
            assert key.shape in built
    wanted = plan(rows=["loop-24gb"])
    assert wanted == [Key("base", "4b"), Key("loop-24gb", "4b")]
    assert {key.shape for key in plan(is_small=True)} == {"small", "smollm2"}


# --- deadline, end of the time, Ctrl-C, and the next start ------------------------------------------------------------


def bench(tmp_path: Path, *, minutes: float = 1, is_again: bool = False) -> command.Bench:
    return command.Bench(
        Results(tmp_path, is_again=is_again), work=tmp_path, card="CPU", minutes=minutes, is_small=True
    )


def test_a_row_past_its_deadline_is_ended_and_one_without_time_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, minutes=0).measure(Key("matmul", "small"))
    assert "matmul-small: not begun" in capsys.readouterr().out
    order = Order("base", "small", "bfloat16", str(tmp_path))
    [part] = bench(tmp_path)._run(Path(sys.executable), order, 0.2, tmp_path / "log")
    assert part["reason"] == "not done after 0 s; its log is log"


def test_a_row_that_fails_leaves_its_reason_and_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first dies without a word, the second cannot even be started, the third is measured; then only the two run
    again."""
    made = bench(tmp_path)
    with monkeypatch.context() as patch:
        (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
        (tmp_path / "python").chmod(0o755)
        patch.setenv("ART_UNSLOTH_PYTHON", str(tmp_path / "python"))
        made.measure(Key("train-unsloth", "small"))
        patch.setenv("ART_UNSLOTH_PYTHON", str(tmp_path / "nothing"))
        made.measure(Key("train-unsloth", "smollm2"))
    made.measure(Key("matmul", "small"))
    page = (tmp_path / "GPU.md").read_text()
    assert "Unsloth, tiny: ended with status -9" in page
    assert re.search(r"Unsloth, SmolLM2-135M: \S+nothing cannot be run: No such file or directory", page)
    assert made.failed == ["train-unsloth-small", "train-unsloth-smollm2"]
    capsys.readouterr()
    again = bench(tmp_path, minutes=0)
    for key in (Key("train-unsloth", "small"), Key("matmul", "small")):
        again.measure(key)
    assert capsys.readouterr().out.splitlines() == [
        "train-unsloth-small: not begun, as too little time is left; run it again to go on",
        "matmul-small: kept",
    ]


def test_rows_that_came_to_their_end_are_kept_and_others_are_run_again(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(measured())
    results.add(measured(row="loop-trl", figures={}, reason="OutOfMemoryError: 80 GB"))
    with results.lines.open("ab") as file:
        file.write(b'{"row": "server-vllm", "sha')  # its writer was killed
    key = ("0.6b", "bfloat16", "NVIDIA X")
    assert results.has(("loop-vllm", *key))
    assert not results.has(("loop-vllm", "0.6b", "bfloat16", "NVIDIA Y"))
    assert not results.has(("loop-vllm", "0.6b", "float32", "NVIDIA X"))
    assert not results.has(("loop-trl", *key))
    assert not Results(tmp_path, is_again=True).has(("loop-vllm", *key))


# --- the table --------------------------------------------------------------------------------------------------------


def cells(page: str, model: str) -> list[str]:
    """The line of a model in the table to publish."""
    _, _, rest = page.partition("### LoRA on one GPU")
    [line] = [line for line in rest.partition("###")[0].splitlines() if line.startswith(f"| {model} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_has_ours_beside_trls_fastest_or_the_reason(tmp_path: Path) -> None:
    results = Results(tmp_path)
    ours = {"step_s": 2.0, "tokens_per_s": 16000.0, "learner_gb": 5.1, "memory_gb": 71.2, "weights": "random"}
    results.add(measured(figures=ours))
    results.add(measured(shape="8b", figures={"memory_gb": 80.0}, reason="art train: out of memory"))
    results.add(measured(row="loop-trl", figures={}, reason="OutOfMemoryError: 80 GB"))
    page = results.page.read_text()
    assert cells(page, "Qwen3-0.6B") == ["2", "16,000", "5.1", "71.2", "OutOfMemoryError: 80 GB", "", "", "", ""]
    assert cells(page, "Qwen3-8B") == ["art train: out of memory", *[""] * 8]
    assert "- TRL with vLLM, Qwen3-0.6B: OutOfMemoryError: 80 GB" in page
    results.add(measured(row="loop-trl", figures={"step_s": 5.0, "batch": 16}, versions={"vllm": "0.31.0"}))
    results.add(measured(row="loop-trl-64", figures={"step_s": 3.0, "batch": 64}, versions={"vllm": "0.31.0"}))
    page = results.page.read_text()
    assert cells(page, "Qwen3-0.6B")[4:] == ["3", "", "", "64", "1.5"]
    assert "torch 2.13.0; TRL's rows: vllm 0.31.0; 2026-11-23." in page


# --- what surrounds a row ---------------------------------------------------------------------------------------------
