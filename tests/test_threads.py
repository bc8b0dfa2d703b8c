"""Threads that compute: gone when they are let go, and back with the next computation."""

import os
import time
from pathlib import Path

import pytest
import torch

from art_cli import threads

TASKS = Path("/proc/self/task")
DEADLINE_S = 10.0


@pytest.mark.skipif(not TASKS.exists(), reason="tells a process's threads apart by Linux's /proc")
def test_a_pool_that_is_let_go_ends_and_comes_back() -> None:
    num_threads, states = torch.get_num_threads(), torch.randn(512, 512)
    torch.set_num_threads(2)
    try:
        threads.let_pool_go()
        before = set(os.listdir(TASKS))
        first = states @ states
        pool = set(os.listdir(TASKS)) - before
        assert pool
        threads.let_pool_go()
        deadline = time.monotonic() + DEADLINE_S
        while pool & set(os.listdir(TASKS)):
            assert time.monotonic() < deadline
        assert torch.equal(states @ states, first)
        assert set(os.listdir(TASKS)) - before
    finally:
        torch.set_num_threads(num_threads)
