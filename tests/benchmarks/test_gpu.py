"""`make bench-gpu` on a CPU: every row runs in the small mode, and what it says can be true.

The numbers of rows are checked against what the work is: 2 prompts of 48 tokens, 4 attempts at each, 8 new tokens.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.cards import known_peak
from benchmarks.gpu.order import Order
from benchmarks.gpu.results import Measured, Results
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.sampling import _parameters
from benchmarks.gpu.shapes import SHAPES, make_tokenizer
from tests.support.paths import ROOT
from tests.support.real_vllm import IS_THERE

PROMPTS, ATTEMPTS, PROMPT, NEW = 2, 4, 48, 8
SAMPLED = PROMPTS * ATTEMPTS * NEW
GAP = 0.05  # nats; bfloat16 has 8 bits of mantissa, and engine and learner round differently
VLLM = ("sample-vllm", "loop-vllm")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last line of each row."""
    work = tmp_path_factory.mktemp("gpu")
    told = [sys.executable, "-m", "benchmarks.gpu", "--small", "--work", str(work), "--minutes", "12"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(told, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (work / "gpu.jsonl").read_text().splitlines()]
    page = (work / "GPU.md").read_text()
    assert all(ROWS[line["row"]].what in page for line in lines)
    return {line["row"]: line for line in lines}


def figures(small: dict[str, Any], row: str) -> dict[str, Any]:
    found: dict[str, Any] = small[row]["figures"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_has_numbers_or_says_what_is_missing(small: dict[str, Any]) -> None:
    assert small.keys() == ROWS.keys()
    missing = {row: line["reason"] for row, line in small.items() if line["reason"] is not None}
    assert "needs a GPU" in missing.pop("sleep-vllm") or not IS_THERE
    assert "Unsloth" in missing.pop("train-unsloth", "Unsloth")
    if not IS_THERE:
        assert all("no Python with vLLM" in missing.pop(row) for row in VLLM)
    assert not missing
    assert all(line["versions"]["torch"] and line["card"] == "CPU" for line in small.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ["sample-embedded", "sample-vllm"])
def test_an_engine_samples_what_it_was_asked_for_with_the_learners_logprobs(small: dict[str, Any], row: str) -> None:
    if small[row]["reason"]:
        pytest.skip(small[row]["reason"])
    found = figures(small, row)
    assert found["requests"] == PROMPTS * ATTEMPTS
    assert 0.9 * SAMPLED <= found["tokens"] <= SAMPLED  # a reply may end early
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    assert 0 < found["mfu"] < 1 and found["memory_gb"] > 0.1
    assert 0 <= found["gap"] < GAP and found["gap_tokens"] == pytest.approx(SAMPLED, rel=0.1)
    if row == "sample-vllm":
        assert found["swap_moves"] > 10 * max(found["gap"], found["swap_returns"])  # another adapter, and back
        assert 0 < found["swap_s"] < found["start_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_step_counts_its_tokens_and_flex_attention_says_why_it_is_off(small: dict[str, Any]) -> None:
    for row in ("train-torch", "train-dense", "train-unsloth"):
        if small[row]["reason"]:
            continue
        found = figures(small, row)
        assert (found["tokens_trained"], found["tokens_flat"]) == (SAMPLED, PROMPTS * ATTEMPTS * (PROMPT + NEW))
        assert found["tokens_computed"] == PROMPTS * (PROMPT + ATTEMPTS * NEW) or not found["packed"]
        assert found["tokens_per_s"] == pytest.approx(found["tokens_flat"] / found["step_s"])
        assert 0 < found["mfu"] < 1 and found["mfu"] == pytest.approx(found["tflops"] / found["peak_tflops"])
        assert found["grad_norm"] == pytest.approx(figures(small, "train-dense")["grad_norm"], rel=0.05)
    assert "backward on CPU" in figures(small, "train-torch")["flex_reason"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_loops_play_the_same_number_of_attempts_and_tokens(small: dict[str, Any]) -> None:
    for row in [row for row in ROWS if row.startswith("loop-") and not small[row]["reason"]]:
        found = figures(small, row)
        assert found["attempts"] == PROMPTS * ATTEMPTS and found.get("failed", 0) == 0
        assert 0.9 * SAMPLED <= found["tokens"] <= SAMPLED
        assert found["step_s"] > 0 and 0 < found["reward"] < 1
        if not row.startswith("loop-trl"):
            assert 0 <= found["gap"] < GAP and found["sample_s"] + found["train_s"] <= found["step_s_range"][1]


# --- without a run ----------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> Measured:
    told: dict[str, Any] = {
        "row": "loop-vllm", "shape": "0.6b", "card": "NVIDIA X", "dtype": "bfloat16", "when": "2026-11-23 04:00",
        "seconds": 1.0, "versions": {"torch": "2.13.0"}, "figures": {"step_s": 2.0},
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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parameters_counted_are_those_of_the_model(shape: str) -> None:
    hidden, layers, heads, heads_kv, head_dim, intermediate, vocabulary = SHAPES[shape]
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads_kv, head_dim=head_dim, intermediate_size=intermediate, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    assert _parameters(Order("base", shape, "bfloat16", "")) == sum(p.numel() for p in model.parameters())


def test_every_id_of_the_vocabulary_is_a_token() -> None:
    tokenizer = make_tokenizer(3000)
    assert len(tokenizer) == 3000
    assert len(set(tokenizer.convert_ids_to_tokens(list(range(3000))))) == 3000


def test_rows_that_came_to_their_end_are_kept_and_others_are_run_again(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(measured())
    results.add(measured(row="loop-trl", figures={}, reason="OutOfMemoryError: 80 GB"))
    with results.lines.open("ab") as file:
        file.write(b'{"row": "sample-vllm", "sha')  # its writer was killed
    assert results.has(("loop-vllm", "0.6b", "NVIDIA X", "bfloat16"))
    assert not results.has(("loop-vllm", "0.6b", "NVIDIA Y", "bfloat16"))
    assert not results.has(("loop-trl", "0.6b", "NVIDIA X", "bfloat16"))
    assert not Results(tmp_path, is_again=True).has(("loop-vllm", "0.6b", "NVIDIA X", "bfloat16"))
    assert "TRL, micro-batch 16, 0.6b: OutOfMemoryError: 80 GB" in results.page.read_text()
    results.add(measured(row="loop-trl", figures={"step_s": 5.0}))
    results.add(measured(row="loop-trl-64", figures={"step_s": 3.0}))
    page = results.page.read_text()
    assert "Not measured" not in page
    assert "| art train, vLLM and torch | 0.6b | 2 | 1.5 |" in page  # against TRL's fastest


def test_a_row_past_its_deadline_is_ended_and_one_without_time_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = command.Bench(Results(tmp_path), work=tmp_path, dtype="bfloat16", minutes=0)
    bench.measure("base", "small")
    assert "base-small: not begun" in capsys.readouterr().out
    order = Order("base", "small", "bfloat16", str(tmp_path))
    [part] = bench._run(Path(sys.executable), order, 0.2, tmp_path / "log")
    assert part["reason"] == "not done after 0 s; its log is log"
