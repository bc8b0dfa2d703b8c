"""`art train` on a server of the Tinker protocol that others wrote: SkyRL with JAX, on a CPU. The reward must rise.

    python3.12 -m venv skyrl && skyrl/bin/pip install 'skyrl[tinker,jax]==0.4.0' aiohttp uv
    pip install --no-deps --target sdk tinker==0.25.0
    python -m benchmarks.others.other_servers --python skyrl/bin/python --sdk sdk

SkyRL 0.4.0 goes with SDK 0.25.0 and 0.3.0 with 0.24.1 (docs/backend.md). The installation is 7 GB, because it brings
torch for CUDA where the package index has no other, so no test does this. Prints the reward of the first and the last
steps.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.shared.paths import ROOT
from tests.letters.build import build
from tests.support.servers.ports import free_port

LETTERS = ROOT / "tests" / "letters" / "config.yaml"
START_S, TRAIN_S = 120.0, 600.0
BACKEND = '{"max_lora_adapters": 4, "max_lora_rank": 8, "sample_max_num_sequences": 64}'


@contextmanager
def skyrl(python: Path, home: Path) -> Iterator[str]:
    """The address of a SkyRL with the letters task's model. It starts only by `uv run`."""
    port = free_port()
    options = ["--backend", "jax", "--base-model", str(home / "base"), "--backend-config", BACKEND]
    options += ["--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(home / "checkpoints")]
    options += ["--database-url", f"sqlite:///{home / 'skyrl.db'}"]
    run = [str(python.parent / "uv"), "run", "--active", "--no-project", "-m", "skyrl.tinker.api", *options]
    settings = {"VIRTUAL_ENV": str(python.parent.parent), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    settings |= {"UV_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            run, cwd=home, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}", server, home / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def _wait(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{address}/api/v1/get_server_capabilities", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit(f"SkyRL did not start:\n{log.read_text(errors='replace')[-2000:]}")


def train(address: str, home: Path, sdk: Path, steps: int) -> list[float]:
    """The reward of each step."""
    there = ["engine=tinker", "learner=tinker", f"engine.base_url={address}", f"engine.base_model={home / 'base'}"]
    run = [f"runs={home}", f"train.steps={steps}", "train.learning_rate=3e-3", "eval=null"]
    done = subprocess.run(
        [sys.executable, "-m", "art_cli", "train", str(LETTERS), *there, *run],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(sdk), "TINKER_API_KEY": "tml-any", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TRAIN_S,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [float(value) for value in re.findall(r"reward_mean ([\d.]+)", done.stderr + done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment that has SkyRL")
    parser.add_argument("--sdk", type=Path, required=True, help="a directory with the SDK that goes with it")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skyrl-") as directory:
        home = Path(directory)
        build(home / "base")
        with skyrl(options.python.absolute(), home) as address:
            rewards = train(address, home, options.sdk.absolute(), options.steps)
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(f"reward of the first 5 steps {first:.2f}, of the last 5 of {len(rewards)} {last:.2f}")
    if len(rewards) != options.steps or last < first + 0.2:
        raise SystemExit("it did not learn")


if __name__ == "__main__":
    main()
