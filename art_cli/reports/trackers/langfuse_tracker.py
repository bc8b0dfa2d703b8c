"""Sends each attempt to Langfuse as a trace with generations and tools, and its rewards as scores.

Traces go to Langfuse's own OTLP address, with the attributes that its SDK writes (langfuse.*) beside OpenTelemetry's.
Scores go to POST /api/public/scores. Neither needs its SDK. The keys are LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from art_cli.config.sections.tracker_config import LangfuseTrackerConfig
from art_cli.formats.traces.otlp import OtlpSender, Poster, clean, traces_url
from art_cli.formats.traces.saved import source_of
from art_cli.formats.traces.spans import Span, TracedRun, reward_of, shortened, spans_of, trace_id_of
from art_cli.reports.trackers import TrackedRun
from art_cli.reports.trackers.otel import Losses, unhurried
from art_cli.reports.trackers.table import Groups
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import UsageError

CLOUD = "https://cloud.langfuse.com"
TRACES, SCORES = "/api/public/otel/v1/traces", "/api/public/scores"
MAX_SCORES = 500  # scores of one request
# attributes of ours -> those in which Langfuse shows what went in and came out
SHOWN = {
    "gen_ai.input.messages": "langfuse.observation.input",
    "gen_ai.output.messages": "langfuse.observation.output",
    "gen_ai.tool.call.arguments": "langfuse.observation.input",
    "gen_ai.tool.call.result": "langfuse.observation.output",
    "gen_ai.evaluation.explanation": "langfuse.observation.output",
}
KINDS = {"invoke_agent": "agent", "chat": "generation", "execute_tool": "tool"}


class LangfuseTracker:
    def __init__(self, run: TrackedRun, config: LangfuseTrackerConfig) -> None:
        """Raises UsageError: a key is not set."""
        url = config.url or os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST") or CLOUD
        url = traces_url(url.rstrip("/") + TRACES).removesuffix(TRACES)
        headers = headers_of(os.environ)
        self.source = source_of(run.root, run.config)
        self._sender = OtlpSender(url + TRACES, headers, timeout_s=config.timeout_s)
        json_type = {"content-type": "application/json"}
        self._scores = Poster(url + SCORES, headers | json_type, timeout_s=config.timeout_s)
        self._max_groups = config.max_groups
        self._losses = Losses("langfuse")

    @staticmethod
    def check_keys() -> None:
        """Raises UsageError: a key is not set."""
        headers_of(os.environ)

    def log(self, line: MetricsLine) -> None:
        """Langfuse has no place for the metrics of a step."""

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        self._send("train", groups)

    def log_evaluation(self, step: int, groups: Groups) -> None:
        self._send("eval", groups)

    def _send(self, split: str, groups: Groups) -> None:
        attempts = [attempt for group in groups[: self._max_groups] for attempt in group]

        def send() -> None:
            self._sender.send(span for each in unhurried(attempts) for span in observations(each, self.source, split))
            scores = [score for each in attempts for score in scores_of(each, self.source, split)]
            for start in range(0, len(scores), MAX_SCORES):
                self._scores.post(msgspec.json.encode(scores[start : start + MAX_SCORES]))

        self._losses.watch(send, len(attempts))

    def close(self) -> None:
        self._losses.tell()


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of Langfuse's SDK. Raises UsageError: a key is not set."""
    names = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
    if missing := [name for name in names if not environment.get(name)]:
        raise UsageError(
            f"tracker langfuse: {' and '.join(missing)} not set; the project's settings in Langfuse show both"
        )
    public, secret = (environment[name] for name in names)
    word = base64.b64encode(f"{public}:{secret}".encode()).decode()
    return {
        "authorization": f"Basic {word}",
        "x-langfuse-public-key": public,
        "x-langfuse-ingestion-version": "4",  # spans are shown as they come in
    }


def observations(attempt: Trajectory, source: TracedRun, split: str) -> Iterator[Span]:
    """The attempt's spans with the attributes by which Langfuse knows a trace, its session and its generations."""
    for span in spans_of(attempt, source, split=split):
        own: dict[str, Any] = {
            "langfuse.trace.name": f"{source.name} {split}",
            "langfuse.trace.tags": [split, f"step-{attempt.step}"],
            "session.id": clean(f"{source.name}/{split}/{attempt.step}/{attempt.group_id}")[:200],
            "langfuse.observation.type": KINDS.get(str(span.attributes.get("gen_ai.operation.name")), "evaluator"),
            **{key: span.attributes[name] for name, key in SHOWN.items() if name in span.attributes},
        }
        usage = {kind: span.attributes.get(f"gen_ai.usage.{kind}_tokens") for kind in ("input", "output")}
        if own["langfuse.observation.type"] == "generation" and None not in usage.values():
            own["langfuse.observation.model.name"] = source.model
            own["langfuse.observation.usage_details"] = json.dumps(usage)
        if span.error is not None:
            own |= {"langfuse.observation.level": "ERROR", "langfuse.observation.status_message": span.error}
        yield span._replace(attributes={**span.attributes, **own})


def scores_of(attempt: Trajectory, source: TracedRun, split: str) -> Iterator[dict[str, Any]]:
    """Yields the attempt's reward, its judges' scores and its own metrics.

    An attempt sent again replaces its scores.
    """
    trace = trace_id_of(attempt, source, split).hex()
    time = datetime.fromtimestamp(max(0.0, attempt.started_at), UTC).isoformat()

    def score(name: str, value: float, comment: str | None = None) -> dict[str, Any]:
        key = hashlib.sha256(f"{trace}\n{name}".encode(errors="replace")).hexdigest()[:32]
        record = {"id": key, "traceId": trace, "name": clean(name), "value": value, "dataType": "NUMERIC"}
        return record | {"timestamp": time} | ({"comment": clean(shortened(comment))} if comment else {})

    if (reward := reward_of(attempt)) is not None:
        yield score("reward", reward)
    for each in attempt.scores if isinstance(attempt, ScoredTrajectory) else ():
        yield score(f"judge.{each.judge}", each.score, each.explanation)
    for name, value in attempt.metrics.items():
        if not name.startswith("num_"):  # the gateway's own counts
            yield score(f"metric.{name}", value)
