"""The plan's section "elsewhere?": a run's duration on other machines, and the useful number of GPUs."""

from collections.abc import Iterator, Sequence

import msgspec

from art_cli.reports.pages.report_text import duration

ASSUMPTION = "replies as long as in the measured steps; agents, judge and art itself as fast as here"


class ScalingRow(msgspec.Struct, frozen=True):
    """A number of machines. Example: ScalingRow(8, 4.1, 820.0, 5.4, 0.93, "generation")"""

    num: int  # GPUs, or 1 CPU
    step_s: float
    run_s: float  # the whole run, including start and evaluations
    usd: float | None  # cost of the whole run including the judge; None for unknown prices
    share: float  # steps per hour, as a share of linear scaling from the smallest number
    limit: str  # longest part of a step


class Elsewhere(msgspec.Struct, frozen=True):
    """The run on a kind of machine."""

    machine: str
    basis: str  # source of the machine's speeds, or why rows are missing
    rows: list[ScalingRow] = []
    stops_at: int | None = None  # number of GPUs above which more add little, if found


def elsewhere_text(found: Sequence[Elsewhere]) -> str:
    """Returns the section, after an empty line."""
    lines = ["", f"elsewhere? {ASSUMPTION}", *(line for each in found for line in _machine(each))]
    return "".join(f"{line}\n" for line in lines)


def _machine(found: Elsewhere) -> Iterator[str]:
    yield f"  {found.machine:14s} {found.basis}"
    if found.rows:
        yield f"    {'number':>6s} {'s/step':>9s} {'the run':>14s} {'dollars':>11s} {'of linear':>9s}  limited by"
    for row in found.rows:
        usd = "unknown" if row.usd is None else f"${row.usd:,.2f}"
        numbers = f"{row.num:6,d} {row.step_s:9,.3g} {duration(row.run_s):>14s} {usd:>11s} {row.share:9.0%}"
        yield f"    {numbers}  {row.limit}"
        if row.num == found.stops_at:
            yield f"    {'':6s} above {row.num:,} more add little"
