"""An OpenAI-compatible server on loopback that answers chat completions as a function says.

`answer(body, number)` gives the text of the reply, or an HTTP status with a body, for the request with that number.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass
class ChatServer:
    answer: Callable[[Json, int], str | tuple[int, Json]]
    asked: list[Json] = field(default_factory=list)
    api_base: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: Json) -> tuple[int, Json]:
        with self.lock:
            self.asked.append(body)
            said = self.answer(body, len(self.asked))
        if not isinstance(said, str):
            return said
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return 200, {**head, "choices": [choice], "usage": usage}


@contextmanager
def chatting(server: ChatServer) -> Iterator[ChatServer]:
    """The server while it listens, with its `api_base`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, reply = server.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        server.api_base = f"http://127.0.0.1:{http.server_address[1]}/v1"
        try:
            yield server
        finally:
            http.shutdown()
