import uuid
from collections.abc import Iterator

import pytest

from tests.support.standins.fragile_store import FragileFileSystem


@pytest.fixture
def address() -> Iterator[str]:
    """An empty store in memory, which the test may make fail."""
    FragileFileSystem.before = staticmethod(lambda call, path: None)
    FragileFileSystem.calls.clear()
    yield f"fragile://{uuid.uuid4().hex}/runs"
    FragileFileSystem.before = staticmethod(lambda call, path: None)
    FragileFileSystem.store.clear()
