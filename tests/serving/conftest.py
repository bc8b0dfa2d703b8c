"""The run that the tests of serving serve."""

import pytest

from art_cli.runs.run_dir import RunDir
from tests.support.servers.served import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", (1, 2), rewards={1: 0.1, 2: 0.9})
