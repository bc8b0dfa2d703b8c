"""RunPanel: the terminal panel that `art train` shows, with a line per subject.

    ╭─ tictactoe ────────────────────────────────────────╮
    │ step    12 of 160                                  │
    │ now     rollouts  23/64  reward 0.412  1,280 tok/s │
    │ reward  0.516  ▁▂▂▃▄▅▅▆▇█                          │
    ╰────────────────────────────────────────────────────╯

Input is numbers, and text that may quote models and user code. Text is shown literally and controls nothing.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from art_cli.config.metric_names import SHADOW
from art_cli.reports.pages.report_text import BARS, duration, spark
from art_cli.runs.history import Evaluated, Failures, History, UpdateNumbers
from art_cli.runtime.errors import printable
from art_cli.runtime.log import Bar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ASCII_BARS = "_.:-=+*#"  # bars for terminals without Unicode
RECENT = 10  # number of recent steps for estimating the remaining time
LABEL = 8  # columns of a line's label
MAX_WIDTH = 100  # columns of the panel
ECHO = 3  # free columns at the right, so a "^C" echoed by the terminal does not wrap
MIN_ROWS = 4  # lines of the smallest panel
MAX_SPARK = 40  # characters of the reward's curve

_OF_STEP = re.compile(r"step \d+/\d+(: )?")


class RunPanel:
    """A run's panel. `follow` takes earlier starts, `add` takes new records.

    Records are added and drawn in different threads, so attributes are always replaced as a whole.
    """

    def __init__(self, name: str, *, num_steps: int) -> None:
        self.name, self.num_steps = name, num_steps
        self.history = History([], [])
        self._failures: Failures | None = None  # of the newest step
        self._stages: tuple[tuple[str, int, int, str], ...] = ()  # (title, done, total, facts), newest last

    def follow(self, history: History) -> None:
        """Shows the history of earlier starts."""
        self.history = history

    def show_failures(self, failures: Failures) -> None:
        self._failures = failures

    def add(self, record: UpdateNumbers | Evaluated) -> None:
        updates, evaluations, warm_up = self.history
        if isinstance(record, UpdateNumbers):
            self.history = History([*updates, record], evaluations, warm_up)
        else:
            self.history = History(updates, [*evaluations, record], warm_up)

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[Bar]:
        """Shows a stage of the run while the block runs."""
        depth = len(self._stages)

        def move(done: int, total: int, facts: str = "") -> None:
            self._stages = (*self._stages[:depth], (title, done, total, facts), *self._stages[depth + 1 :])

        move(0, 0)
        try:
            yield move
        finally:
            self._stages = self._stages[:depth]

    # --- the lines ----------------------------------------------------------------------------------------------------

    def rows(self, width: int, *, bars: str = BARS) -> list[tuple[str, str]]:
        """Returns (label, text) rows, most important rows at the top; `width` is the text width."""
        updates = self.history.updates
        done = updates[-1].number if updates else 0
        rows = [("step", f"{min(done + 1, self.num_steps)} of {self.num_steps}"), ("now", self._now())]
        rows += [("reward", self._reward(width, bars)), ("time", self._time()), ("eval", self._evaluated())]
        rows += [
            ("signal", self._newest("no_signal_share", "none in {:.0%} of the groups")),
            ("shadow", self._shadow()),
        ]
        rows += [("failed", self._failed()), ("cost", self._newest("run_usd", "${:,.4f} for the judge so far"))]
        rows += [("speed", self._newest("sample_tokens_per_s", "{:,.0f} tokens/s sampled"))]
        return [(label, text) for label, text in rows if text]

    def _now(self) -> str:
        if not self._stages:
            return ""
        title, done, total, facts = self._stages[-1]
        title = _OF_STEP.sub("", title) or "rollouts"  # the line above shows the step
        count = f"{done:,}/{total:,}" if total else ""
        return "  ".join(filter(None, [title, count, facts]))

    def _reward(self, width: int, bars: str) -> str:
        rewards = [each.metrics["reward_mean"] for each in self.history.updates if "reward_mean" in each.metrics]
        if not rewards:
            return ""
        value = f"{rewards[-1]:.3f}"
        return f"{value}  {spark(rewards, max(min(width - len(value) - 2, MAX_SPARK), 1), bars=bars)}"

    def _evaluated(self) -> str:
        found = [(each.metrics["reward"], each.step) for each in self.history.evaluations if "reward" in each.metrics]
        if not found:
            return ""
        (reward, step), (best, at) = found[-1], max(found)
        return f"{reward:.3f} at step {step}" + (f", best {best:.3f} at {at}" if at != step else "")

    def _shadow(self) -> str:
        """Example: "short 0.412 beside 0.516"."""
        metrics = self.history.updates[-1].metrics if self.history.updates else {}
        names = [name.removeprefix(SHADOW) for name in metrics if name.startswith(SHADOW)]
        shown = [f"{name} {metrics[SHADOW + name]:.3f} beside {metrics[f'{SHADOW}{name}.reward']:.3f}"
                 for name in names if f"{SHADOW}{name}.reward" in metrics]  # fmt: skip
        return ", ".join(shown)

    def _failed(self) -> str:
        failed = self._failures
        if failed is None or not failed.num_played:
            return ""
        return f"{failed.num} of {failed.num_played}" + (f", mostly {failed.cause}" if failed.num else "")

    def _newest(self, name: str, text: str) -> str:
        """Returns the text with the newest step's metric, or "" if it is missing."""
        value = self.history.updates[-1].get(name) if self.history.updates else None
        return "" if value is None else text.format(value)

    def _time(self) -> str:
        clocks = [each.metrics["run_s"] for each in self.history.updates if "run_s" in each.metrics]
        if not clocks:
            return ""
        recent = clocks[-RECENT - 1 :]
        steps_left = self.num_steps - self.history.updates[-1].number
        if len(recent) < 2:
            return duration(round(clocks[-1]))
        left = steps_left * (recent[-1] - recent[0]) / (len(recent) - 1)
        return f"{duration(round(clocks[-1]))}, about {duration(round(left))} left"

    # --- drawing ------------------------------------------------------------------------------------------------------

    def render(self, console: "Console") -> "RenderableType":
        """Returns the panel for the console's current size. Lines are cut, not wrapped."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        columns, lines = console.size
        width = min(columns - ECHO, MAX_WIDTH)
        is_unicode = console.encoding.startswith("utf")
        rows = self.rows(width - LABEL - 4, bars=BARS if is_unicode else ASCII_BARS)[: max(lines - MIN_ROWS, 1)]
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=LABEL - 1, no_wrap=True, style="dim")
        table.add_column(ratio=1, no_wrap=True)
        for label, text in rows:
            table.add_row(label, Text(printable(text), no_wrap=True, overflow="ellipsis" if is_unicode else "crop"))
        if width < 20 or lines < MIN_ROWS + 2:
            return Text(printable(rows[0][1])[: max(width, 1)], no_wrap=True)
        return Panel(table, title=Text(printable(self.name, limit=60)), title_align="left", width=width)
