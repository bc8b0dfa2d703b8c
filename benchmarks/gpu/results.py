"""The rows measured so far: JSON lines, appended as each row ends, and GPU.md, the table made of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.runs.durable import LineWriter, read_lines, write_file
from benchmarks.gpu.rows import ROWS

COLUMNS = {  # kind of rows -> figures that its table shows, with their heads
    "card": {"tflops": "TFLOP/s", "sheet_tflops": "data sheet", "mfu": "share", "build_s": "built, s",
             "disk_gb": "GB on disk"},
    "sampling": {"tokens_per_s": "tokens/s", "seconds": "s", "tokens": "tokens", "mfu": "MFU", "memory_gb": "GB",
                 "gap": "gap to learner, nats", "gap_max": "largest", "start_s": "start, s", "swap_s": "swap, s"},
    "server": {"start_s": "start, s", "sleep_s": "sleep, s", "wake_s": "wake, s", "freed_gb": "GB freed",
               "awake_gb": "GB awake", "wake_gap": "gap after waking, nats"},
    "training": {"step_s": "step, s", "tokens_per_s": "tokens/s", "mfu": "MFU", "memory_gb": "GB",
                 "tokens_computed": "computed", "tokens_flat": "of tokens", "first_step_s": "first step, s",
                 "attention": "attention"},
    "loop": {"step_s": "step, s", "ratio": "TRL's over it", "sample_s": "sampling, s", "train_s": "training, s",
             "tokens": "tokens sampled", "gap": "gap, nats", "memory_gb": "GB", "samples_by": "sampled by"},
}  # fmt: skip
TITLES = {
    "card": "The card and the models",
    "sampling": "Sampling",
    "server": "vLLM beside a learner on one GPU",
    "training": "A training step",
    "loop": "The whole loop",
}
HEAD = """# On a GPU

Written by `make bench-gpu`. Models have random weights in the shapes of Qwen3, so lengths and speed are real and
text is not. MFU is the share of the card's peak in dense bfloat16 that the work needs at least:
nothing computed twice counts.
"""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One row on one card. Example: Measured(row="sample-vllm", shape="0.6b", card="NVIDIA H200", ...)"""

    row: str
    shape: str
    card: str
    dtype: str
    when: str  # UTC, to the minute
    seconds: float  # the whole process, imports included
    versions: dict[str, str]
    figures: dict[str, Any]  # those that it came to
    reason: str | None = None  # why it did not come to its end; None: it did
    here: bool = True  # False: this machine lacks what the row needs, which is no failure

    @property
    def place(self) -> tuple[str, str, str, str]:
        return self.row, self.shape, self.card, self.dtype


class Results:
    """`gpu.jsonl` and `GPU.md` in a directory. The last line of a row counts."""

    def __init__(self, directory: Path, *, is_again: bool = False) -> None:
        self.lines, self.page = directory / "gpu.jsonl", directory / "GPU.md"
        self._is_again = is_again
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, place: tuple[str, str, str, str]) -> bool:
        """Whether the row was measured to its end before."""
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
    """GPU.md: a part for each card, a table for each kind of rows, then the rows without figures and why."""
    parts = [HEAD]
    by_card: dict[str, list[Measured]] = {}
    for line in measured:
        if line.row in ROWS:  # a row that there is no more stays in the file and is not shown
            by_card.setdefault(f"{line.card}, {line.dtype}", []).append(line)
    for card, lines in by_card.items():
        lines.sort(key=lambda line: (line.shape != "0.6b", list(ROWS).index(line.row)))
        parts.append(f"## {card}\n\n{_versions(lines)}\n")
        for kind in COLUMNS:
            rows = [line for line in lines if ROWS[line.row].kind == kind and line.figures]
            if rows:
                parts.append(f"### {TITLES[kind]}\n\n{_table(kind, rows)}\n")
        if failed := [line for line in lines if line.reason is not None]:
            parts.append("### Not measured\n\n" + "\n".join(_reason(line) for line in failed) + "\n")
    return "\n".join(parts)


def _versions(lines: Sequence[Measured]) -> str:
    found = {name: version for line in lines for name, version in line.versions.items()}
    days = sorted(line.when[:10] for line in lines)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items())) + f"; {when}."


def _table(kind: str, rows: Sequence[Measured]) -> str:
    columns = COLUMNS[kind]
    lines = [["row", "model", *columns.values()], ["---"] * (2 + len(columns))]
    for row in rows:
        figures = row.figures | ({"ratio": ratio} if (ratio := _ratio(row, rows)) else {})
        lines.append([ROWS[row.row].what, row.shape, *(_shown(figures.get(name)) for name in columns)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _ratio(row: Measured, rows: Sequence[Measured]) -> float | None:
    """Seconds of TRL's step at its fastest setting over this row's; None: it is TRL's own, or there is none."""
    if ROWS[row.row].kind != "loop" or row.row.startswith("loop-trl") or "step_s" not in row.figures:
        return None
    theirs = [
        other.figures["step_s"] for other in rows if other.row.startswith("loop-trl") and other.shape == row.shape
    ]
    return min(theirs) / row.figures["step_s"] if theirs else None


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/")


def _reason(line: Measured) -> str:
    return f"- {ROWS[line.row].what}, {line.shape}: {_shown(line.reason)}"
