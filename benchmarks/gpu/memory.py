"""Memory in GB: of the whole card while a row runs, or, where there is no GPU, the largest process's."""

import contextlib
import resource
import threading
from collections.abc import Iterator

EVERY_S = 0.1  # between two looks at the card
KIB = 1024


class Peak:
    """The most that was in use so far."""

    def __init__(self) -> None:
        self.gb = 0.0

    def look(self) -> float:
        """GB in use now."""
        now = used_gb()
        self.gb = max(self.gb, now)
        return now


def used_gb() -> float:
    """GB of the card that any process holds; without a GPU, of the largest of this process and those it waited for."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return float(total - free) / 1e9
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most * KIB / 1e9


@contextlib.contextmanager
def watched() -> Iterator[Peak]:
    """Looks at the memory all the while."""
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.look()
