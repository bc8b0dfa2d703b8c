"""The process that forked.py forks from. It has imported what training and serving need, and never runs torch itself.

    to it      one message for each process: Asked as JSON, with its three streams and a pipe for what becomes of it
    from it    over that pipe: the process's id, and its wait status once it has ended

It ends when the other end of its socket is closed. What it started goes on.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
from importlib import import_module
from typing import NamedTuple

import openai.resources.chat.completions  # noqa: F401
import peft  # noqa: F401
import transformers  # noqa: F401

from art_cli.cli import app as cli  # noqa: F401
from art_cli.config import compose  # noqa: F401
from art_cli.engines.embedded import embedded_engine as engine  # noqa: F401
from art_cli.learners import torch_learner  # noqa: F401
from art_cli.loop import evaluate, train  # noqa: F401
from art_cli.loop.nights import night  # noqa: F401
from art_cli.serving import serve_service  # noqa: F401
from art_cli.serving.gateway import gateway_service  # noqa: F401

MAX_BYTES = 2**17  # longest message; it is mostly the environment
NUM_STREAMS = 3
NEWS = struct.Struct("=q")  # a process's id, then its wait status


class Asked(NamedTuple):
    module: str
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    leads_session: bool  # as subprocess's start_new_session


def serve(control: socket.socket) -> Asked | None:
    """Forks until the other end is closed: None. In each forked process it returns what that process has to run."""
    ends: dict[int, int] = {}  # a process's pidfd: the pipe for its status
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fd)
                    report(key.fd, ends.pop(key.fd))
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, NUM_STREAMS + 1)
                if not message:
                    return None
                asked, news = Asked(*json.loads(message)), descriptors[NUM_STREAMS]
                child = os.fork()
                if child == 0:
                    become(asked, descriptors[:NUM_STREAMS])
                    os.write(news, NEWS.pack(os.getpid()))
                    for descriptor in descriptors:
                        os.close(descriptor)
                    return asked
                for descriptor in descriptors[:NUM_STREAMS]:
                    os.close(descriptor)
                pidfd = os.pidfd_open(child)
                ends[pidfd] = news
                selector.register(pidfd, selectors.EVENT_READ)


def report(pidfd: int, news: int) -> None:
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None
    killed = result.si_code != os.CLD_EXITED
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(news, NEWS.pack(-result.si_status if killed else result.si_status))
    os.close(pidfd)
    os.close(news)


def become(asked: Asked, streams: list[int]) -> None:
    """This process is as if it had just been started with `python -m MODULE ARGUMENTS`."""
    if asked.leads_session:
        os.setsid()
    for place, descriptor in enumerate(streams):
        os.dup2(descriptor, place)
    os.chdir(asked.directory)
    os.environ.clear()
    os.environ.update(asked.environment)
    tempfile.tempdir = None  # it is looked for in the environment
    sys.argv = [asked.module, *asked.arguments]
    sys.path[:1] = [asked.directory, *filter(None, asked.environment.get("PYTHONPATH", "").split(os.pathsep))]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        import_module("sitecustomize")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests' terminal is for them
    gc.freeze()  # what is there now is shared by all processes
    with socket.socket(fileno=int(sys.argv[1])) as own_end:
        asked = serve(own_end)
    if asked is not None:
        runpy.run_module(asked.module, run_name="__main__", alter_sys=True)
