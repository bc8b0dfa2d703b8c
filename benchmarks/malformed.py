"""10,000 malformed requests on each path of each protocol, to `art serve` and to a rollout's gateway: no 5xx, no crash.

    python -m benchmarks.malformed                      # 50,000 to each of the two; about ten minutes on 2 cores
    python -m benchmarks.malformed --requests 500       # a quick look

Random bytes, torn HTTP, wrong types, deep JSON, impossible conversations, and damaged versions of what real clients
send (tests/support/malformed.py), seeded. `unanswered` are those that a server cannot know to be whole, or whose
connection it closed; whole ones are answered. After each path a well-formed request must get its 200. Exit code 1
otherwise, and where anything got a 5xx. The gateway keeps what it records of the one rollout that asks.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from art_cli.chat.requests import Sampling  # noqa: E402
from art_cli.rollouts.rollout_gateway import Gateway  # noqa: E402
from tests.serving.test_fuzz_server import ANSWER_S, art_serve, bombard, resident_mib, send  # noqa: E402
from tests.support.malformed import PATHS, RICH, malformed, post  # noqa: E402
from tests.support.scripted import Engine  # noqa: E402
from tests.support.served import make_run  # noqa: E402
from tests.support.template_backend import TemplateBackend  # noqa: E402


async def measure(server: str, root: str, number: int, pid: int, key: str = "") -> bool:
    """Prints a row for each path, with the memory of the server's process; whether all was as it must be."""
    is_well = True
    for seed, path in enumerate(PATHS):
        statuses = await bombard(root, malformed(seed, paths=[path], key=key), number)
        heads = ("Connection: close", f"Authorization: Bearer {key}")
        good = await send(root, post(path, json.dumps(RICH[path]).encode(), *heads), ANSWER_S)
        num_failed = sum(count for status, count in statuses.items() if status >= 500)
        is_well = is_well and num_failed == 0 and good == 200
        print(row(server, path, statuses, num_failed, good), f"{resident_mib(pid):6.0f}", flush=True)
    return is_well


def row(server: str, path: str, statuses: Counter[int], num_failed: int, good: int) -> str:
    others = sum(count for status, count in statuses.items() if 400 < status < 500)
    counts = (statuses.total(), statuses[200], statuses[400], others, statuses[0], num_failed)
    return f"{server:10s} {path:28s}" + "".join(f"{count:11d}" for count in counts) + f"  {good}"


async def run(number: int) -> bool:
    names = ("sent", "200", "400", "other 4xx", "unanswered", "5xx")
    print(f"{'server':10s} {'path':28s}" + "".join(f"{name:>11s}" for name in names) + "  then    MiB")
    with tempfile.TemporaryDirectory(prefix="art-malformed-") as place:
        async with art_serve(make_run(Path(place) / "mine", (1,)).root, "--max-body", "1") as (process, root):
            is_well = await measure("art serve", root, number, process.pid)
    is_well = is_well and process.returncode == 0
    gateway = Gateway(Engine(TemplateBackend(lambda _: "yes"), "mine"), defaults=Sampling(), seed=0, max_turns=10**9)
    async with gateway.serve() as url:
        return await measure("gateway", url.removesuffix("/v1"), number, os.getpid(), gateway.open("t0")) and is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="on each path")
    logging.disable(logging.CRITICAL)  # the gateway here warns of each torn request
    return 0 if asyncio.run(run(parser.parse_args().requests)) else 1


if __name__ == "__main__":
    sys.exit(main())
