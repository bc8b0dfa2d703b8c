"""Freed memory is used again without asking the kernel for it, and what is kept does not grow with each computation."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from art_cli.runtime.allocator import memory_size

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

ROUNDS = """
import resource
{setting}
def play():
    blocks = [bytearray(16 << 20) for _ in range(4)]
play()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    play()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

STEPS = """
import asyncio, random, threading, time
from pathlib import Path
from art_cli.runtime import allocator
from art_cli.runtime import threads

allocator.KEPT = 96 << 20
NUM_STEPS, POOL = 12, 6
is_over = threading.Event()

def step(draw):
    blocks = [bytearray(draw.randint(1 << 20, 20 << 20)) for _ in range(8)]
    for _ in range(8):
        del blocks[draw.randrange(len(blocks))]
        blocks.append(bytearray(draw.randint(1 << 20, 20 << 20)))

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

async def train():
    allocator.keep_freed_memory()
    draw, held = random.Random(0), []
    print(resident_mib())
    for number in range(NUM_STEPS):
        await threads.compute(step, draw)
        print(resident_mib())
        if number < POOL - 1:  # blocks the thread that computed, so that the next step runs in another one
            held.append(asyncio.ensure_future(asyncio.to_thread(is_over.wait)))
            await asyncio.sleep(0.01)
    is_over.set()
    await asyncio.gather(*held)

asyncio.run(train())
"""


def output(program: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def page_faults(setting: str, **environment: str) -> int:
    return int(output(ROUNDS.format(setting=setting), **environment))


@pytest.mark.slow
def test_blocks_that_are_freed_are_not_asked_of_the_kernel_again() -> None:
    kept = "from art_cli.runtime.allocator import keep_freed_memory; keep_freed_memory()"
    without = page_faults("")
    assert page_faults(kept) < without / 10
    assert page_faults(kept, MALLOC_TRIM_THRESHOLD_="131072") > without / 2, "a user's own setting was not left alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MALLOC_ARENA_MAX": "16"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=16"},
        {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": "131072"},
    ],
    ids=["as it is", "many arenas", "many arenas by a tunable", "other settings"],
)
def test_steps_in_other_threads_leave_no_more_memory_behind_than_is_kept(environment: dict[str, str]) -> None:
    """Twelve steps of 80 to 170 MiB in blocks of 1 to 20 MiB, the first six each in a thread of its own."""
    before, *after = [float(line) for line in output(STEPS, **environment).split()]
    assert max(after) < before + 96 + 32, after  # KEPT, and the ends of pages and heaps


def test_the_memory_is_the_machines_or_the_containers_limit_and_not_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("art_cli.runtime.allocator._LIMITS", (str(limit), str(tmp_path / "nowhere")))
    for text, size in (("max\n", physical), ("1000000\n", 1_000_000), (str(2**62), physical)):
        limit.write_text(text)
        assert memory_size() == size
