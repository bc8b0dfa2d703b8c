"""Trains in forked children, so that starting again costs a fork and not ten imports. Driven by test_kill.py.

Reads one JSON list of overrides per line; for each, forks a child that trains tests/letters with them, writes its
process id as a line, waits for its end and writes its status as another. The parent itself never runs torch.
"""

import asyncio
import gc
import json
import os
import sys

import peft  # noqa: F401  (imported here once, for every child)
import transformers  # noqa: F401

from art_cli import log
from art_cli.config.compose import load_config
from art_cli.engines.embedded import engine  # noqa: F401
from art_cli.learners import torch_learner  # noqa: F401
from art_cli.loop.train import train
from tests.support.paths import LETTERS

CONFIG = LETTERS / "config.yaml"


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            log.set_up()
            asyncio.run(train(load_config(CONFIG, json.loads(line))))
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


gc.freeze()
main()
