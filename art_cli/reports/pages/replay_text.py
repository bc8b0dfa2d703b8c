"""What `art replay` says, as a table for a terminal.

Takes what `art replay --json` prints as plain data; returns text.
"""

from collections.abc import Mapping
from typing import Any


def replay_text(found: Mapping[str, Any]) -> str:
    """The replay as a table. What stands in the run's files is in it as it is, so print it with `printable_lines`."""
    rows = [["", "recorded", "computed again", "difference", ""]]
    for row in found["rows"]:
        difference = "" if row["difference"] is None else f"{row['difference']:.3g}"
        note = "; ".join(filter(None, [row["verdict"] if row["verdict"] != "same" else "", row["at"], row["why"]]))
        if row["verdict"] == "same":
            note = (
                "same"
                if not row["difference"]
                else f"same but for rounding, most at {row['at']}"
                if row["at"]
                else "same"
            )
        rows.append(
            [
                row["name"],
                _shown(row["recorded"]),
                "" if row["verdict"] == "not computed" else _shown(row["computed"]),
                difference,
                note,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{found['run']}, step {found['step']}, sample {found['sample']}: {found['id']}"]
    for row_of in rows:
        cells = [cell.ljust(width) for cell, width in zip(row_of, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row_of[4]]).rstrip())
    if found["engine_gap"] is not None:
        lines.append(f"  engine and learner differ by {found['engine_gap']:.2g} nats a token in the mean")
    if found["change"] is not None:
        lines.append(f"  the step moved the logprob of a token by {found['change']:+.4f} nats in the mean")
    num = sum(row["verdict"] == "differs" for row in found["rows"])
    open_ = sum(row["verdict"] == "not computed" for row in found["rows"])
    end = "all that was computed is as recorded" if not num else f"{num} of {len(found['rows'])} differ from the record"
    lines.append(end + (f"; {open_} could not be computed again" if open_ else ""))
    return "".join(f"{line}\n" for line in lines)


def _shown(value: Any) -> str:
    """A value in a cell: a number, or of a list what it holds."""
    if value is None or value == {}:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {num}" for key, num in value.items())
    if isinstance(value, list):
        flat = [x for each in value for x in (each if isinstance(each, list) else [each]) if x is not None]
        if not flat:
            return "none"
        if len(set(flat)) == 1:
            return f"{flat[0]:.6g} throughout"
        return f"{min(flat):.4g} to {max(flat):.4g}"
    return str(value)
