"""`make bench-gpu` on a CPU: every row runs with the tiny model, and its numbers can be true.

They are checked against the work: 2 prompts of 48 tokens, 4 attempts at each, 8 new tokens. The order, the deadline,
the end of the time, Ctrl-C and the next start are tried with rows that take no time.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import loop, memory, shapes, trl_loop
from benchmarks.gpu.cards import known_peak
from benchmarks.gpu.order import Order
from benchmarks.gpu.results import Measured, Results
from benchmarks.gpu.rows import PLAN, ROWS, Key, plan
from benchmarks.gpu.shapes import SHAPES, make_qwen3, make_tokenizer, num_multiplied
from benchmarks.gpu.task import prompts, reward
from tests.support.others.real_vllm import IS_THERE
from tests.support.paths import ROOT

PROMPTS, ATTEMPTS, PROMPT, NEW = 2, 4, 48, 8
SAMPLED = PROMPTS * ATTEMPTS * NEW
GAP = 0.05  # nats of the tiny model; bfloat16 has 8 bits of mantissa, and engine and learner round differently
Small = dict[Key, dict[str, Any]]
# Rows that differ from another one by a setting: on a CPU the other one runs in their place.
SAME = {"loop-vllm": "loop-updates", "loop-trl-64": "loop-trl"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The last line of each row."""
    work = tmp_path_factory.mktemp("gpu")
    told = [sys.executable, "-m", "benchmarks.gpu", "--small", "--work", str(work), "--minutes", "13"]
    told += ["--shape", *(name for name in SHAPES if name != "small"), "--only", *(ROWS.keys() - SAME.keys())]
    done = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (work / "gpu.jsonl").read_text().splitlines()]
    page = (work / "GPU.md").read_text()
    assert all(ROWS[line["row"]].what in page for line in lines)
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
    for row in ("train-torch", "train-dense", "train-unsloth"):
        if small[Key(row, "small")]["reason"]:
            continue
        found = tiny(small, row)
        assert (found["tokens_trained"], found["tokens_flat"]) == (SAMPLED, PROMPTS * ATTEMPTS * (PROMPT + NEW))
        assert found["tokens_computed"] == PROMPTS * (PROMPT + ATTEMPTS * NEW) or not found["packed"]
        assert found["tokens_per_s"] == pytest.approx(found["tokens_flat"] / found["step_s"])
        assert found["mfu"] == pytest.approx(found["tflops"] / found["peak_tflops"])
        assert found["grad_norm"] == pytest.approx(tiny(small, "train-dense")["grad_norm"], rel=0.05)
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
            assert found["updates"] == (2 if row == "loop-updates" else 1)
            assert 0 <= found["probe_gap"] < GAP and found["first_reply_s"] > 0


# --- without a run ----------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> Measured:
    told: dict[str, Any] = {
        "row": "loop-vllm", "shape": "0.6b", "dtype": "bfloat16", "card": "NVIDIA X", "when": "2026-11-23 04:00",
        "seconds": 1.0, "versions": {"torch": "2.13.0"}, "figures": {"step_s": 2.0, "weights": "random"},
    }  # fmt: skip
    return Measured(**told | changes)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        ("CPU", None),
    ],
)
def test_a_card_is_known_by_whole_words_of_its_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


@pytest.mark.parametrize(
    ("shape", "billions", "embedded"), [("0.6b", 0.596, 0), ("1.7b", 1.72, 0), ("4b", 4.02, 0), ("8b", 8.19, 0.622)]
)
def test_shapes_have_the_published_number_of_parameters(shape: str, billions: float, embedded: float) -> None:
    """As their model cards count them. Embeddings that are not the head multiply nothing."""
    config = make_qwen3(SHAPES[shape])
    assert num_multiplied(config) / 1e9 == pytest.approx(billions - embedded, rel=0.005)


def test_every_row_names_its_function() -> None:
    for row in ROWS.values():
        module, _, function = row.entry.partition(":")
        assert callable(getattr(import_module(f"benchmarks.gpu.{module}"), function))


def test_every_id_of_the_vocabulary_is_a_token() -> None:
    tokenizer = make_tokenizer(3000)
    assert len(tokenizer) == 3000
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(3000))))) == 3000


def test_replies_of_a_group_have_different_rewards() -> None:
    """Whatever the model writes: common words, or text without any digit."""
    rewards = [reward(text) for text in prompts(64, 100)]
    assert len(set(rewards)) > 60 and all(0 < value < 1 for value in rewards)
    assert reward("12 + 3") == 0


# --- the order --------------------------------------------------------------------------------------------------------


def test_what_is_worth_most_comes_first() -> None:
    """The loop with the smallest model, then a real model's weights, then the sizes, TRL, and the parts alone."""
    order = [(key.row, key.shape) for key in PLAN if key.row != "base"]
    assert order[0] == ("loop-vllm", "0.6b") and order[1] == ("loop-vllm", "smollm2")
    first = [
        order.index(each)
        for each in (
            ("server-vllm", "smollm2"), ("loop-vllm", "1.7b"), ("loop-vllm", "4b"), ("loop-vllm", "8b"),
            ("loop-trl", "0.6b"), ("server-vllm", "0.6b"), ("loop-updates", "4b"), ("loop-24gb", "4b"),
            ("train-torch", "0.6b"),
        )
    ]  # fmt: skip
    assert first == sorted(first)
    assert {key.row for key in PLAN} == ROWS.keys() and len(set(PLAN)) == len(PLAN)
    assert {key.dtype for key in PLAN if key.row == "server-vllm" and key.shape == "smollm2"} == {"bfloat16", "float32"}


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


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_the_next_start_goes_on(tmp_path: Path) -> None:
    rows = ["matmul", "loop-embedded", "train-dense"]  # two run at a time, after the base; the first to end leaves two
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--work", str(tmp_path), "--only", *rows]
    lines = tmp_path / "gpu.jsonl"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        end = time.monotonic() + 400
        while not (lines.exists() and lines.read_bytes().count(b"\n") > 1):
            assert time.monotonic() < end and first.poll() is None
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        printed = first.communicate(timeout=120)[0]
    assert first.returncode == 130 and ": interrupted" in (tmp_path / "GPU.md").read_text(), printed
    kept = json.loads(lines.read_text().splitlines()[1])["row"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and f"{kept}-small: kept" in done.stdout
    assert "Not measured" not in (tmp_path / "GPU.md").read_text()


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


def test_the_table_says_which_weights_are_random(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(measured())
    results.add(measured(shape="1.7b", figures={"step_s": 2.0, "weights": "Qwen/Qwen3-1.7B"}))
    page = results.page.read_text()
    assert "Published weights: Qwen3-1.7B." in page
    assert "Random weights in the published shape, as no hub was reached: Qwen3-0.6B." in page


# --- what surrounds a row ---------------------------------------------------------------------------------------------


def test_a_failed_run_gives_the_cause_below_the_first_line() -> None:
    log = (
        "starting\nerror: vllm: the server ended while it started (exit status 1); the last lines of vllm.log:\n"
        "error: (EngineCore) ERROR ValueError: Free memory on device is less than desired\n"
        "error: (APIServer) RuntimeError: Engine core initialization failed\n"
    )
    assert loop._error(log) == (
        "vllm: the server ended while it started (exit status 1); the last lines of vllm.log: / (EngineCore) ERROR "
        "ValueError: Free memory on device is less than desired"
    )
    assert loop._error("Killed\n") == "Killed" and loop._error("") == "it wrote nothing"
    assert loop._started("INFO first reply after 95.20 s: python 1.0") == {"first_reply_s": 95.2}


def test_trl_beside_a_vllm_that_it_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake vLLM of another version, whose number TRL reads from its metadata."""
    pytest.importorskip("trl")
    imported = import_module("trl.import_utils")
    monkeypatch.setattr(trl_loop.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(imported, "_is_package_available", lambda *_, **__: (True, "0.99.0"))
    reason = trl_loop.missing(has_gpu=True)
    assert reason is not None and reason.endswith("You have version 0.99.0")
    monkeypatch.setattr(imported, "_is_package_available", lambda *_, **__: (True, "0.31.0"))
    assert trl_loop.missing(has_gpu=True) is None
    monkeypatch.undo()
    assert trl_loop.missing(has_gpu=False) is None


def test_without_a_hub_the_weights_are_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that refuses, and one that answers and has no such repository."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert not shapes._has_hub()
    assert not shapes._link_published(SHAPES["0.6b"], tmp_path)
    assert not any(tmp_path.iterdir())


def test_without_a_driver_memory_is_a_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "card_gb", lambda: None)
    assert 0.01 < memory.used_gb() < 100
    assert memory.wait_for_card(0.0, timeout_s=0.0)


NVML = """
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(1ul << 40 | index); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)(1ul << 40 | 7);
    return uuid[0] != 'G';
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    unsigned long index = (unsigned long)handle ^ 1ul << 40;
    found->total = 80000000000, found->used = (index + 1) * 1000000000, found->free = found->total - found->used;
    return index > 99;
}
"""


@pytest.mark.skipif(which("cc") is None, reason="no C compiler here")
def test_the_drivers_count_of_the_first_visible_card_is_read(tmp_path: Path) -> None:
    """From a library with NVML's names and layout: GPU n has n + 1 GB in use; its handles need all 64 bits."""
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libnvidia-ml.so.1")],
        input=NVML, text=True, check=True,
    )  # fmt: skip
    code = "from benchmarks.gpu.memory import card_gb; print(card_gb())"
    for visible, used in (
        (None, "1.0"),
        ("3", "4.0"),
        ("2,0", "3.0"),
        ("GPU-1f", "8.0"),
        ("", "None"),
        ("MIG-1", "None"),
    ):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == used, (visible, done)


def test_what_holds_the_rest_of_a_card_ends_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that holds nothing stands for it. One that fails raises, because the row would measure a large card."""
    path = tmp_path / "pid"
    hold = (
        f"import os, sys; open({str(path)!r}, 'w').write(str(os.getpid())); print('held', flush=True); sys.stdin.read()"
    )
    monkeypatch.setattr(memory, "HOLD", hold)
    with memory.only_free(23.5):
        os.kill(int(path.read_text()), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
    monkeypatch.setattr(memory, "HOLD", "raise MemoryError")
    with pytest.raises(RuntimeError, match="could not be held"), memory.only_free(23.5):
        pass


def test_a_row_waits_until_the_one_before_has_left_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([70.0, 30.0, 0.4])
    monkeypatch.setattr(memory, "card_gb", lambda: next(used))
    monkeypatch.setattr(memory, "EVERY_S", 0.0)
    assert memory.wait_for_card(1.0, timeout_s=5.0)
    monkeypatch.setattr(memory, "card_gb", lambda: 70.0)
    assert not memory.wait_for_card(1.0, timeout_s=0.0)
