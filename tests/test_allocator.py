"""Freed memory is used again without asking the kernel for it."""

import platform
import subprocess
import sys

import pytest

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


def page_faults(setting: str, **environment: str) -> int:
    program = ROUNDS.format(setting=setting)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_blocks_that_are_freed_are_not_asked_of_the_kernel_again() -> None:
    kept = "from art_cli.allocator import keep_freed_memory; keep_freed_memory()"
    without = page_faults("")
    assert page_faults(kept) < without / 10
    assert page_faults(kept, MALLOC_TRIM_THRESHOLD_="131072") > without / 2, "a user's own setting was not left alone"
