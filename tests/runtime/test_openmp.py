"""Threads that compute: gone when they are let go, back with the next computation, and none where one does."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from art_cli.runtime import openmp

TASKS = Path("/proc/self/task")
DEADLINE_S = 10.0


@pytest.mark.skipif(not TASKS.exists(), reason="tells a process's threads apart by Linux's /proc")
def test_a_pool_that_is_let_go_ends_and_comes_back() -> None:
    num_threads, states = torch.get_num_threads(), torch.randn(512, 512)
    torch.set_num_threads(2)
    try:
        openmp.release_pool()
        before = set(os.listdir(TASKS))
        first = states @ states
        pool = set(os.listdir(TASKS)) - before
        assert pool
        openmp.release_pool()
        deadline = time.monotonic() + DEADLINE_S
        while pool & set(os.listdir(TASKS)):
            assert time.monotonic() < deadline
        assert torch.equal(states @ states, first)
        assert set(os.listdir(TASKS)) - before
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.skipif(not TASKS.exists(), reason="torch has GNU's OpenMP on Linux")
def test_a_thread_that_computes_alone_leaves_the_others_their_pools() -> None:
    num_threads, found = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def work() -> None:
        found.append(torch.get_num_threads())
        with openmp.single_threaded():
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    def after() -> None:
        found.append(torch.get_num_threads())

    try:
        for target in (work, after):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join(DEADLINE_S)
        assert found == [2, 1, 2, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
