"""The official SDK on the server through a proxy that loses, cuts, delays and repeats.

`python -m benchmarks.attacks.lossy` is the long form of it, which kills both sides thirty times.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load

from tests.support.attacks.lossy_proxy import LossyProxy, Rates
from tests.support.paths import ROOT
from tests.support.processes.waiting import until
from tests.support.servers.backend_server import serving, tiny_base
from tests.tinker.test_backend import are_equal, saved, trained

CLIENT = ROOT / "tests" / "support" / "attacks" / "lossy_client.py"
RATES = Rates(lost=0.03, unanswered=0.1, cut=0.03, repeated=0.25, replayed=0.25, late=0.1, refused=0.0)
BATCHES = [[list(range(start, start + 20)), list(range(start + 3, start + 23))] for start in (10, 20, 30)]


async def start(address: str, directory: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, str(CLIENT), address, str(directory / "ledger"), str(directory / "batches"))
    return await asyncio.create_subprocess_exec(*command, env=environment)


@pytest.mark.slow
async def test_over_a_lossy_network_and_a_kill_each_update_is_there_once(tmp_path: Path) -> None:
    """Requests are lost, repeated and delayed, and the client is killed when it has its first checkpoint. The adapter
    is bit for bit that of the same updates in this process."""
    base = tiny_base(tmp_path / "base")
    (tmp_path / "batches").write_text(json.dumps(BATCHES))
    with serving(base, tmp_path / "root") as address:
        proxy = LossyProxy(address, seed=3, rates=RATES)
        async with proxy.serve() as lossy, asyncio.timeout(100):
            client = await start(lossy, tmp_path)
            await until((tmp_path / "ledger").exists)
            client.kill()
            await client.wait()
            client = await start(lossy, tmp_path)
            assert await client.wait() == 0
    at = tmp_path / "root" / json.loads((tmp_path / "ledger").read_bytes())["path"].removeprefix("tinker://")
    assert json.loads((at / "manifest.json").read_bytes())["step"] == len(BATCHES)
    found = load((at / "adapter_model.safetensors").read_bytes())
    assert are_equal(found, saved(trained(base, BATCHES, seed=5), tmp_path / "local"))
    assert all(proxy.counts[fault] for fault in ("unanswered", "repeated", "replayed")), proxy.counts
