"""Meter: what was asked and answered, as Prometheus metrics. They hold no content and no keys."""

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Meter:
    """The metrics of one service, in a separate registry. The service gives the gauges their functions."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        text = "Requests by route and status; 499: the client went away."
        self.requests = Counter("art_requests", text, ["route", "code"], registry=own)
        self.prompt_tokens = Counter("art_prompt_tokens", "Tokens of prompts.", ["model"], registry=own)
        self.sampled_tokens = Counter("art_sampled_tokens", "Tokens sampled.", ["model"], registry=own)
        self.changes = Counter("art_checkpoint_changes", "Changes to another checkpoint.", ["model"], registry=own)
        text = "From a completion's request line to the end of its reply."
        self.request_s = Histogram("art_request_seconds", text, buckets=BUCKETS_S, registry=own)
        text = "From a streamed request's parsing to its first token."
        self.first_token_s = Histogram("art_first_token_seconds", text, buckets=BUCKETS_S, registry=own)
        text = "Requests let in and not gone: replies not yet read count."
        self.in_flight = Gauge("art_requests_inside", text, registry=own)
        self.answering = Gauge("art_requests_answering", "Of these, at the engine.", registry=own)
        self.ready = Gauge("art_ready", "Whether requests are taken.", registry=own)
        self.step = Gauge("art_policy_step", "The step whose weights answer.", ["model"], registry=own)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
