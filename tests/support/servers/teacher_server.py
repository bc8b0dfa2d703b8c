"""A vLLM-like server on loopback that gives the logprobs of prompts under given weights.

    POST /v1/completions   {"prompt": [ids], "prompt_logprobs": 0} -> prompt_logprobs as vLLM writes them
    POST /tokenize         {"prompt": text} -> its tokens

`faults` are the statuses of the first completions, in order; 0 closes the connection without an answer.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from art_cli.models.weights import Weights
from tests.support.records.trees import logprobs_of


@dataclass
class TeacherServer:
    weights: Weights
    key: str | None = None
    faults: list[int] = field(default_factory=list)
    can_tokenize: bool = True
    spoil: Any = None  # applied to the prompt_logprobs of every answer
    asked: list[list[int]] = field(default_factory=list)  # the prompts, in the order of asking
    url: str = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            if not self.can_tokenize:
                return 404, {"detail": "Not Found"}
            return 200, {"tokens": self.weights.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        if self.faults:
            return self.faults.pop(0), {"error": {"message": f"the key {self.key} is tired"}}
        ids = body["prompt"]
        self.asked.append(ids)
        with self.weights.lock, torch.no_grad():
            found = logprobs_of(self.weights, ids).tolist()
        given: list[Any] = [None, *({str(i): {"logprob": x, "rank": 1}} for i, x in zip(ids[1:], found, strict=True))]
        return 200, {"choices": [{"text": "", "prompt_logprobs": self.spoil(given) if self.spoil else given}]}


@contextmanager
def teaching(server: TeacherServer) -> Iterator[TeacherServer]:
    """The server while it listens, with its `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, answer = server.answer(self.path, body)
            if server.key is not None and self.headers["authorization"] != f"Bearer {server.key}":
                status, answer = 401, {"error": f"not the key {server.key}"}
            if status == 0:
                return
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):  # a client may have given up
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listener.server_address[1]}/v1"
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join(5)
