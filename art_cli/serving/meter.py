"""Meter: what was asked and answered, as numbers in Prometheus' text format (version 0.0.4). No content, no keys."""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Labels = tuple[tuple[str, str], ...]  # (("model", "mine"), ("code", "200"))


class Gauge(NamedTuple):
    """Example: Gauge("art_requests_inside", "Requests let in and not gone.", {(): 3.0})."""

    name: str
    help: str
    values: Mapping[Labels, float]


class Histogram:
    """Counts of seconds by upper bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last: beyond every bound
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def lines(self, name: str) -> Iterator[str]:
        seen = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{bound}"}} {seen}'
        yield f"{name}_sum {self.total_s:.6f}"
        yield f"{name}_count {seen}"


class Meter:
    def __init__(self) -> None:
        self.requests: Counter[Labels] = Counter()  # route, code
        self.prompt_tokens: Counter[Labels] = Counter()  # model
        self.sampled_tokens: Counter[Labels] = Counter()  # model
        self.changes: Counter[Labels] = Counter()  # model
        self.request_s = Histogram()
        self.first_token_s = Histogram()

    def render(self, gauges: Iterable[Gauge]) -> str:
        counters = (
            ("art_requests_total", "Requests by route and status; 499: the client went away.", self.requests),
            ("art_prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("art_sampled_tokens_total", "Tokens sampled.", self.sampled_tokens),
            ("art_checkpoint_changes_total", "Changes to another checkpoint.", self.changes),
        )
        histograms = (
            ("art_request_seconds", "From a completion's request line to the end of its reply.", self.request_s),
            ("art_first_token_seconds", "From a streamed request's parsing to its first token.", self.first_token_s),
        )
        lines: list[str] = []
        for name, text, values in counters:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", *_samples(name, values)]
        for name, text, histogram in histograms:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram", *histogram.lines(name)]
        for gauge in gauges:
            lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} gauge"]
            lines += _samples(gauge.name, gauge.values)
        return "\n".join(lines) + "\n"


def _samples(name: str, values: Mapping[Labels, float]) -> Iterator[str]:
    for labels, value in sorted(values.items()):
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
        yield f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
