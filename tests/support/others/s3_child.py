"""Works on the S3 server that the environment names, in a Python that has s3fs, and prints what it saw as JSON."""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import s3fs

from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage import object_store as store_module
from art_cli.runs.storage.fetch import fetch, restore
from art_cli.runs.storage.object_store import ObjectStore, take
from art_cli.runs.storage.uploads import Uploads, steps_of
from art_cli.runtime.errors import ArtError, RunError
from tests.support.records.kept_runs import add_step, content, made


def send(run: RunDir, store: ObjectStore) -> None:
    uploads = Uploads(run, store, keep=2, keeps_best=True, confirm=lambda: None)
    uploads.look()
    while uploads.send(everything=True):
        pass


def kills(place: Path) -> Any:
    """Processes that upload checkpoints 2 to 7 and are killed at random instants, and what a new machine gets then.

    It comes first: a process that has used S3 cannot be forked.
    """
    run, address, draw = made(place / "mine", 1), "s3://bucket/kills/mine", random.Random(3)
    for step in range(2, 8):
        add_step(run, step, size=2_000_000)
        child = os.fork()
        if child == 0:
            send(run, ObjectStore(address))
            os._exit(0)
        time.sleep(draw.uniform(0.1, 0.9))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    seen = []
    for number in range(2):  # after the kills, and after an upload in peace
        new = RunDir(place / f"new-{number}")
        new.root.mkdir()
        restore(new, ObjectStore(address), "token", own=None)
        newest = new.newest_checkpoint()
        step = None if newest is None else newest[1].step
        seen.append((step, step is None or content(new, step) == content(run, step)))
        send(run, ObjectStore(address))
    there = ObjectStore(address).objects()
    parts = {name.split("/")[1] for name in there if name.startswith("checkpoints/")}
    return {"seen": seen, "steps": steps_of(there), "parts": sorted(parts)}


def race(place: Path) -> Any:
    store = ObjectStore("s3://bucket/race/mine")

    def start(number: int) -> bool:
        try:
            take(store, f"machine-{number}")
        except RunError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        return sum(pool.map(start, range(6)))


def names(place: Path) -> Any:
    """Objects that only another client could make, in a bucket that is not listed by directories."""
    send(made(place / "mine", 1), ObjectStore("s3://bucket/names/mine"))
    fs = s3fs.S3FileSystem()
    for name in ("../evil", "../../evil", "a/../../evil", ".ssh/evil", "checkpoints/../../../evil", "logs/"):
        fs.pipe_file(f"bucket/names/mine/{name}", b"x")
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    found = fetch("s3://bucket/names/mine", "everything")
    return {"steps": RunDir(found).checkpoint_steps(), "evil": [str(path) for path in place.rglob("*evil*")]}


class Answers(BaseHTTPRequestHandler):
    status = 403

    def answer(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied for AKIATEST</Message></Error>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *words: object) -> None:
        return None


def faults(place: Path) -> Any:
    """What is said of a server that refuses, is not there, or takes a connection and never answers."""
    store_module.CALL_S, said = 1.5, {}
    refusing = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=refusing.serve_forever, daemon=True).start()
    silent = socket.create_server(("127.0.0.1", 0))
    free = socket.create_server(("127.0.0.1", 0))
    gone = free.getsockname()[1]
    free.close()
    ports = {"403": refusing.server_address[1], "gone": gone, "silent": silent.getsockname()[1]}
    for name, port in ports.items():
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: ObjectStore("s3://bucket/x").objects(),
            "write": lambda: ObjectStore("s3://bucket/x").write("a", b"x"),
        }
        for call, function in calls.items():
            begin = time.monotonic()
            try:
                function()
                said[f"{name} {call}"] = "no error"
            except ArtError as error:
                late = time.monotonic() - begin > 15
                said[f"{name} {call}"] = f"{type(error).__name__}: {error}{' LATE' if late else ''}"
    return said


def main(case: str, place: str) -> None:
    cases = {"kills": kills, "race": race, "names": names, "faults": faults}
    print(json.dumps({name: cases[name](_made(Path(place) / name)) for name in case.split(",")}), flush=True)
    os._exit(0)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


main(*sys.argv[1:])
