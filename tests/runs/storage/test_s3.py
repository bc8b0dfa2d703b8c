"""The same on a real S3 server over HTTP, with S3's own client."""

from pathlib import Path

import pytest

from tests.support.others.real_s3 import MARKS, answer, s3_server

pytestmark = [*MARKS, pytest.mark.slow]


def test_on_s3_no_checkpoint_is_torn_one_machine_gets_a_run_and_faults_are_one_line(tmp_path: Path) -> None:
    """Six uploads end by SIGKILL, six machines start at once, names are hostile, servers refuse or say nothing."""
    with s3_server() as url:
        seen = answer(url, "kills,race,names,faults", str(tmp_path))
    assert seen["race"] == 1
    assert seen["names"] == {"steps": [0, 1], "evil": []}
    for name, said in seen["faults"].items():
        assert said.startswith("StorageError: s3://bucket/x: "), (name, said)
        assert "AKIATEST" not in said and "LATE" not in said and "\n" not in said, (name, said)
    (after_kills, is_same), (at_the_end, is_same_then) = seen["kills"]["seen"]
    assert is_same and is_same_then
    assert after_kills is None or after_kills <= at_the_end == 7
    assert seen["kills"]["steps"] == [0, 6, 7]
    assert seen["kills"]["parts"] == ["step_0000", "step_0006", "step_0007"]
