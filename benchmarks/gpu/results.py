"""The rows measured so far: JSON lines, appended as each row ends, and GPU.md, the tables made of them.

The first table is the one to publish: what a step of LoRA takes on one GPU by model size, beside TRL with vLLM. A row
without figures has its reason there instead.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.runs.durable import LineWriter, read_lines, write_file
from benchmarks.gpu.rows import PLAN, ROWS
from benchmarks.gpu.shapes import LOAD, MODELS, RANK, SHAPES, SMALL_LOAD, Load

COLUMNS = {  # kind of rows -> figures that its table shows, with their heads
    "loop": {"step_s": "step, s", "tokens_per_s": "tokens/s", "sampled_per_s": "tokens/s while sampling",
             "sample_s": "sampling, s", "train_s": "training, s", "first_reply_s": "first reply after, s",
             "learner_gb": "learner's peak, GB", "kept_gb": "it keeps, GB", "memory_gb": "card's peak, GB",
             "probe_gap": "gap of the probe, nats", "gap": "gap of sampled tokens, nats", "samples_by": "sampled by"},
    "sampling": {"tokens_per_s": "tokens/s", "mfu": "MFU", "memory_gb": "GB", "gap": "gap of sampled tokens, nats",
                 "gap_max": "largest", "probe_gap": "gap of random ids, nats", "start_s": "start, s",
                 "swap_s": "swap, s", "sleep_s": "sleep, s", "wake_s": "wake, s", "freed_gb": "GB freed asleep",
                 "wake_gap": "gap after waking, nats"},
    "training": {"step_s": "step, s", "tokens_per_s": "tokens/s", "mfu": "MFU", "memory_gb": "peak, GB",
                 "kept_gb": "it keeps, GB", "tokens_computed": "computed", "tokens_flat": "of tokens",
                 "first_step_s": "first step, s", "attention": "attention"},
    "card": {"tflops": "TFLOP/s", "sheet_tflops": "data sheet", "mfu": "share", "build_s": "built, s",
             "disk_gb": "GB on disk", "weights": "weights"},
}  # fmt: skip
TITLES = {
    "loop": "The whole loop",
    "sampling": "Engines alone",
    "training": "A training step alone",
    "card": "The card and the models",
}
HEAD = """# On a GPU

Written by `make bench-gpu`. "tokens/s" of a loop are sampled tokens over the whole step; of a training step all its
tokens. The learner's peak is what torch allocated in its process, the card's peak what the driver counted of both, most
of which vLLM reserves for keys and values. MFU is the share of the card's peak in dense bfloat16 that the work needs at
least: nothing computed twice counts. A gap is the mean difference of a token's logprob between engine and learner.
"""
SIZES = {"step_s": "step, s", "tokens_per_s": "tokens/s", "learner_gb": "learner's peak, GB", "memory_gb": "card's, GB"}
TRL_SIZES = {"step_s": "TRL: step, s", "tokens_per_s": "tokens/s", "memory_gb": "card's, GB", "batch": "micro-batch"}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One row on one card. Example: Measured(row="loop-vllm", shape="0.6b", card="NVIDIA H200", ...)"""

    row: str
    shape: str
    dtype: str
    card: str
    when: str  # UTC, to the minute
    seconds: float  # the whole process, imports included
    versions: dict[str, str]
    figures: dict[str, Any]  # those that it came to
    reason: str | None = None  # why it did not come to its end, or None if it did
    here: bool = True  # False: this machine lacks what the row needs, which is no failure

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.row, self.shape, self.dtype, self.card


class Results:
    """`gpu.jsonl` and `GPU.md` in a directory. The last line of a row counts."""

    def __init__(self, directory: Path, *, is_again: bool = False) -> None:
        self.lines, self.page = directory / "gpu.jsonl", directory / "GPU.md"
        self._is_again = is_again
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, place: tuple[str, str, str, str]) -> bool:
        """Returns whether the row was measured to its end before."""
        found = self._newest().get(place)
        return not self._is_again and found is not None and found.reason is None

    def add(self, measured: Measured) -> None:
        with LineWriter(self.lines) as writer:
            writer.append(measured)
            writer.sync()
        write_file(self.page, page(self._newest().values()).encode())

    def _newest(self) -> dict[tuple[str, str, str, str], Measured]:
        return {line.place: line for line in read_lines(self.lines, Measured)}


def page(measured: Iterable[Measured]) -> str:
    """Returns GPU.md: a part for each card, with its table of sizes, a table for each kind of rows, then the rows that
    did not come to their end and why."""
    parts = [HEAD]
    by_card: dict[str, list[Measured]] = {}
    for line in measured:
        if line.row in ROWS:  # a row that there is no more stays in the file and is not shown
            by_card.setdefault(line.card, []).append(line)
    for card, lines in by_card.items():
        lines.sort(key=_rank)
        parts.append(f"## {card}\n\n{_versions(lines)}\n")
        parts.append(f"### LoRA on one GPU\n\n{_work(card)} {_sources(lines)}\n\n{_sizes(lines)}\n")
        for kind in COLUMNS:
            rows = [line for line in lines if ROWS[line.row].kind == kind and _has_figures(line)]
            if rows:
                parts.append(f"### {TITLES[kind]}\n\n{_table(kind, rows)}\n")
        if failed := [line for line in lines if line.reason is not None]:
            parts.append("### Not measured to the end\n\n" + "\n".join(_reason(line) for line in failed) + "\n")
    return "\n".join(parts)


def _rank(line: Measured) -> tuple[int, int]:
    rows = list(dict.fromkeys(key.row for key in PLAN))
    return rows.index(line.row), _order_of(line.shape)


def _order_of(shape: str) -> int:
    return MODELS.index(shape) if shape in MODELS else -1


def _has_figures(line: Measured) -> bool:
    return any(name != "weights" for name in line.figures)


def _versions(lines: Sequence[Measured]) -> str:
    """Example: "torch 2.13.0, vllm 0.32.0; TRL's row: torch 2.12.0, trl 1.15.0, vllm 0.31.0; 2026-11-27"."""
    found: dict[str, dict[str, str]] = {"": {}, "TRL's rows: ": {}}
    for line in lines:
        found["TRL's rows: " if ROWS[line.row].python == "trl" else ""] |= line.versions
    texts = [name + ", ".join(f"{k} {v}" for k, v in sorted(each.items())) for name, each in found.items() if each]
    days = sorted(line.when[:10] for line in lines)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return "; ".join([*texts, when]) + "."


# --- the table to publish ---------------------------------------------------------------------------------------------


def _work(card: str) -> str:
    load: Load = SMALL_LOAD if card == "CPU" else LOAD
    return (
        f"A step is {load.prompts} prompts of {load.prompt_tokens} tokens, {load.attempts} attempts of up to "
        f"{load.new_tokens} tokens at each, and one update of an adapter of rank {RANK} on all linear layers, in "
        "bfloat16. Ours contains a checkpoint and the proof that vLLM has its weights. TRL's neither saves nor logs. "
        "It runs without gradient checkpointing, with vLLM in its process. Medians of the steps after the first."
    )


def _sizes(lines: Sequence[Measured]) -> str:
    """Returns a line for each model: a step of `art train` with vLLM, and TRL's at its fastest micro-batch."""
    heads = ["model", *SIZES.values(), *TRL_SIZES.values(), "TRL's step over ours"]
    table = [heads, ["---"] * len(heads)]
    for shape in sorted({line.shape for line in lines}, key=_order_of):
        ours = next((line for line in lines if (line.row, line.shape) == ("loop-vllm", shape)), None)
        theirs = min(
            (line for line in lines if line.shape == shape and ROWS[line.row].python == "trl"),
            key=lambda line: line.figures.get("step_s", float("inf")),
            default=None,
        )
        if ours is None and theirs is None:
            continue
        steps = [line.figures.get("step_s") if line is not None else None for line in (ours, theirs)]
        ratio = steps[1] / steps[0] if steps[0] and steps[1] else None
        table.append([_model(shape), *_cells(ours, SIZES), *_cells(theirs, TRL_SIZES), _shown(ratio)])
    return _text(table)


def _cells(line: Measured | None, columns: dict[str, str]) -> list[str]:
    if line is not None and "step_s" not in line.figures:  # its first cell has the reason instead
        return [_shown(line.reason), *("" for _ in list(columns)[1:])]
    return ["" if line is None else _shown(line.figures.get(name)) for name in columns]


def _model(shape: str) -> str:
    if shape in SHAPES:
        repo = SHAPES[shape].repo
        return repo.partition("/")[2] if repo else "tiny"
    return "SmolLM2-135M"


def _sources(lines: Sequence[Measured]) -> str:
    """Returns which models have published weights. Speed and memory depend on them only by the lengths of replies."""
    sources = {line.shape: str(line.figures["weights"]) for line in lines if "weights" in line.figures}
    drawn = [_model(shape) for shape, source in sources.items() if source == "random"]
    real = [_model(shape) for shape, source in sources.items() if source != "random"]
    texts = [f"Published weights: {', '.join(real)}."] if real else []
    if drawn:
        texts.append(f"Random weights in the published shape, as no hub was reached: {', '.join(drawn)}.")
    return " ".join(texts)


# --- the other tables -------------------------------------------------------------------------------------------------


def _table(kind: str, rows: Sequence[Measured]) -> str:
    columns = {name: head for name, head in COLUMNS[kind].items() if any(name in row.figures for row in rows)}
    lines = [["row", "model", *columns.values()], ["---"] * (2 + len(columns))]
    for row in rows:
        lines.append([ROWS[row.row].what, _title(row), *(_shown(row.figures.get(name)) for name in columns)])
    return _text(lines)


def _title(row: Measured) -> str:
    return _model(row.shape) + ("" if row.dtype == "bfloat16" else f", {row.dtype}")


def _text(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/")


def _reason(line: Measured) -> str:
    return f"- {ROWS[line.row].what}, {_title(line)}: {_shown(line.reason)}"
