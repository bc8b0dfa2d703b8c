"""Why vLLM did not start, read from logs: real log files, and vLLM's format with several processes."""

from pathlib import Path

import pytest

from art_cli.engines.vllm.log_cause import MAX_CAUSE, find_cause

LOGS = Path(__file__).parent / "logs"
REAL = {
    "vllm-0.32-4bit.log": "Value error, Unknown quantization method: bitsandbytes.",
    "vllm-0.32-max-model-len.log": "User-specified max_model_len (400000) is greater than the derived",
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_log_names_its_cause(name: str) -> None:
    cause = find_cause((LOGS / name).read_text())
    assert REAL[name] in cause and "\n" not in cause and len(cause) <= MAX_CAUSE


def test_every_real_log_has_its_cause_here() -> None:
    assert {path.name for path in LOGS.iterdir()} == set(REAL)


def block(process: str, *lines: str, level: str = "ERROR") -> str:
    return "".join(f"({process} pid=7) {level} 11-27 18:11:31 [core.py:1584] {line}\n" for line in lines)


TRACEBACK = ("Traceback (most recent call last):", '  File "core.py", line 1, in run', "    start()")
START = block("APIServer", "ready?", level="INFO") + block("EngineCore", "Initializing", level="INFO")
WORKER = block("Worker_TP1", "WorkerProc failed to start.", *TRACEBACK, "AssertionError")
CORE = block("EngineCore", "EngineCore failed to start.", *TRACEBACK, "Exception: WorkerProc initialization failed")
SERVER = "\n".join([*TRACEBACK, "RuntimeError: Engine core initialization failed. See root cause above."]) + "\n"


def test_the_worker_that_failed_comes_before_those_that_waited_for_it() -> None:
    assert find_cause(START + WORKER + CORE + SERVER) == "AssertionError"
    assert find_cause(START + CORE + WORKER + SERVER) == "Exception: WorkerProc initialization failed"
    assert find_cause(START + CORE + SERVER) == "Exception: WorkerProc initialization failed"
    assert find_cause(START + SERVER) == "RuntimeError: Engine core initialization failed. See root cause above."
    assert find_cause(START) == ""
    assert find_cause(START + SERVER, has_server=False) == ""
    assert find_cause(START + SERVER + CORE, has_server=False) == "Exception: WorkerProc initialization failed"


def test_of_chained_exceptions_the_last_ended_the_process_and_a_second_failure_is_passed_over() -> None:
    chained = [
        *TRACEBACK,
        "KeyError: 'x'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
    ]
    failed = block(
        "EngineCore", *chained, *TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", "more"
    )
    assert find_cause(failed + CORE) == "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"


def test_a_refused_argument_is_the_cause() -> None:
    assert find_cause("usage: entry.py [-h]\nentry.py: error: unrecognized arguments: --no-such\n").endswith(
        "--no-such"
    )


def test_colours_and_odd_bytes_do_not_hide_it() -> None:
    assert find_cause("\x1b[36m(EngineCore pid=7)\x1b[0;0m ERROR 11-27 18:11:31 [core.py:1] " + "Traceback (most recent"
        " call last):\n\x1b[36m(EngineCore pid=7)\x1b[0;0m ERROR 11-27 18:11:31 [core.py:1] ValueError: \ufffd\x00no\n"
    ) == "ValueError: \ufffd\x00no"  # fmt: skip


@pytest.mark.parametrize(
    ("estimate", "cure"),
    [
        ("Based on the available memory, the estimated maximum model length is 28144. ", "set model.max_length=28144"),
        ("", "set model.max_length"),
    ],
)
def test_a_context_that_the_cache_cannot_hold_is_named_by_its_key(estimate: str, cure: str) -> None:
    """vLLM's own advice names other keys, and may be cut off."""
    text = (
        "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is needed, "
        f"which is larger than the available KV cache memory (3.86 GiB). {estimate}Try increasing "
        "`gpu_memory_utilization` (which also controls the size of other allocations) or decreasing `max_model_len` "
        "when initializing the engine."
    )
    assert find_cause(START + block("EngineCore", *TRACEBACK, text)).endswith(f"; {cure}")
