"""Sends each attempt as an OpenTelemetry trace during the run, to any receiver or to Langfuse.

`art log --otlp` sends the same traces afterwards. Steps rejected by the receiver are lost, and later steps are still
sent. There is a single warning, and the number of lost attempts at the end.

Langfuse traces go to its OTLP address, with its SDK's attributes (langfuse.*) and OpenTelemetry's attributes. Scores go
to POST /api/public/scores. No SDK is needed. The keys are LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY.
"""

import base64
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from art_cli.config.sections.tracker_config import LangfuseTrackerConfig, OtelTrackerConfig
from art_cli.formats.traces.otlp import MAX_SECONDS, OtlpSender, Poster, clean, headers_from, traces_url, url_from
from art_cli.formats.traces.saved import source_of
from art_cli.formats.traces.spans import Span, TracedRun, reward_of, shortened, spans_of, trace_id_of
from art_cli.reports.trackers import AttemptsTracker, Groups, TrackedRun
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, score_names
from art_cli.runtime.errors import DeliveryError, UsageError

log = logging.getLogger(__name__)

# A pause between attempts releases Python's interpreter lock for the loop's thread, which otherwise waits up to 5 ms
# for the lock after each torch operation.
PAUSE_S = 0.001

CLOUD = "https://cloud.langfuse.com"
TRACES, SCORES = "/api/public/otel/v1/traces", "/api/public/scores"
MAX_SCORES = 500  # scores per request
MAX_BATCH = 900_000  # bytes per request; Langfuse accepts up to a MiB
# our attributes -> attributes that Langfuse shows as input and output
SHOWN = {
    "gen_ai.input.messages": "langfuse.observation.input",
    "gen_ai.output.messages": "langfuse.observation.output",
    "gen_ai.tool.call.arguments": "langfuse.observation.input",
    "gen_ai.tool.call.result": "langfuse.observation.output",
    "gen_ai.evaluation.explanation": "langfuse.observation.output",
}
KINDS = {"invoke_agent": "agent", "chat": "generation", "execute_tool": "tool"}


class OtelTracker(AttemptsTracker):
    """Counts rejected attempts; logs the initial reason, and the total at the end."""

    name = "otel"

    def __init__(self, run: TrackedRun, config: OtelTrackerConfig) -> None:
        url = url_from(os.environ) if config.url is None else traces_url(config.url)
        self._open(run, config, url, headers_from(os.environ))

    def _open(
        self, run: TrackedRun, config: OtelTrackerConfig | LangfuseTrackerConfig, url: str, headers: dict[str, str]
    ) -> None:
        self.source = source_of(run.root, run.config)
        self._sender = OtlpSender(url, headers, timeout_s=config.timeout_s)
        self._max_groups = config.max_groups
        self._num = self._num_lost = 0

    def log(self, line: MetricsLine) -> None:
        """Traces have no step metrics."""

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        attempts = [attempt for group in groups[: self._max_groups] for attempt in group]
        self._num += len(attempts)
        try:
            self._send(attempts, split)
        except DeliveryError as error:
            if not self._num_lost:
                log.warning("tracker %s: %s; the next step is tried again", self.name, error)
            self._num_lost += len(attempts)

    def _send(self, attempts: Sequence[Trajectory], split: str) -> None:
        """Raises DeliveryError."""
        self._sender.send(span for each in unhurried(attempts) for span in self.spans(each, split))

    def spans(self, attempt: Trajectory, split: str) -> Iterator[Span]:
        """Yields the attempt's spans for this receiver."""
        return spans_of(attempt, self.source, split=split)

    def close(self) -> None:
        if self._num_lost:
            log.warning("tracker %s: %d of %d attempts were lost", self.name, self._num_lost, self._num)


class LangfuseTracker(OtelTracker):
    """Also sends rewards as Langfuse scores."""

    name = "langfuse"

    def __init__(self, run: TrackedRun, config: LangfuseTrackerConfig) -> None:
        """Raises UsageError for a missing key."""
        url = config.url or os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST") or CLOUD
        url = traces_url(url.rstrip("/") + TRACES).removesuffix(TRACES)
        headers = headers_of(os.environ)
        self._open(run, config, url + TRACES, headers)
        json_type = {"content-type": "application/json"}
        self._scores = Poster(url + SCORES, headers | json_type, timeout_s=config.timeout_s)

    @staticmethod
    def check_keys() -> None:
        """Raises UsageError: a key is not set."""
        headers_of(os.environ)

    def spans(self, attempt: Trajectory, split: str) -> Iterator[Span]:
        return observations(attempt, self.source, split)

    def _send(self, attempts: Sequence[Trajectory], split: str) -> None:
        super()._send(attempts, split)
        scores = (score for each in attempts for score in scores_of(each, self.source, split))
        for batch in _batches(map(msgspec.json.encode, scores)):
            self._scores.post(b"[" + b",".join(batch) + b"]")


def _batches(scores: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the scores in batches for single requests."""
    batch, size = list[bytes](), 0
    for score in scores:
        if batch and (len(batch) == MAX_SCORES or size + len(score) >= MAX_BATCH):
            yield batch
            batch, size = [], 0
        batch.append(score)
        size += len(score) + 1
    if batch:
        yield batch


def unhurried(attempts: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Yields the attempts with a pause before each."""
    for attempt in attempts:
        time.sleep(PAUSE_S)
        yield attempt


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of Langfuse's SDK. Raises UsageError for a missing key."""
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
        "x-langfuse-ingestion-version": "4",  # spans appear immediately
    }


def observations(attempt: Trajectory, source: TracedRun, split: str) -> Iterator[Span]:
    """Yields the attempt's spans with Langfuse's attributes for traces, sessions and generations."""
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
    """Yields the attempt's reward, its judges' scores and its metrics. Sending it again replaces its scores."""
    trace = trace_id_of(attempt, source, split).hex()
    time = datetime.fromtimestamp(min(max(0.0, attempt.started_at), MAX_SECONDS), UTC).isoformat()

    def score(name: str, value: float, comment: str | None = None) -> dict[str, Any]:
        key = hashlib.sha256(f"{trace}\n{name}".encode(errors="replace")).hexdigest()[:32]
        record = {"id": key, "traceId": trace, "name": clean(name), "value": value, "dataType": "NUMERIC"}
        return record | {"timestamp": time} | ({"comment": clean(shortened(comment))} if comment else {})

    if (reward := reward_of(attempt)) is not None:
        yield score("reward", reward)
    judged = attempt.scores if isinstance(attempt, ScoredTrajectory) else []
    for judge, each in zip(score_names(judged), judged, strict=True):
        yield score(f"judge.{judge}", each.score, each.explanation)
    for name, value in attempt.metrics.items():
        if not name.startswith("num_"):  # the gateway's counts
            yield score(f"metric.{name}", value)
