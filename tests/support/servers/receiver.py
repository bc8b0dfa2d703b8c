"""A receiver of traces and scores on loopback: keeps what is posted to it, and answers as it is told."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Post(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes  # decompressed

    def spans(self) -> list[Any]:
        """The spans of an OTLP request, decoded by OpenTelemetry's own messages."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        message = ExportTraceServiceRequest()
        message.ParseFromString(self.body)
        return [span for each in message.resource_spans for scope in each.scope_spans for span in scope.spans]


@dataclass
class Receiver:
    url: str = ""
    posts: list[Post] = field(default_factory=list)
    # (status, body, headers) of the answer; called in the thread of the request, so that it may wait
    answer: Callable[[Post], tuple[int, bytes, dict[str, str]]] = lambda post: (200, b"", {})

    def spans(self) -> list[Any]:
        return [span for post in self.posts if post.path.endswith("/v1/traces") for span in post.spans()]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            post = Post(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            receiver.posts.append(post)
            status, said, headers = receiver.answer(post)
            try:
                self.send_response(status)
                for name, value in {"content-length": str(len(said)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)
            except OSError:  # the sender left
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def values(attributes: Any) -> dict[str, Any]:
    """The attributes of a span or an event as plain values."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
