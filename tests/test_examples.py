"""The teaching-size loop in examples/ learns its task."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
def test_the_teaching_loop_learns_the_letters_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Chance is a share of letters of 0.38; after eight updates at least three letters in four characters."""
    spec = spec_from_file_location("one_loop", ROOT / "examples" / "one_loop.py")
    assert spec and spec.loader
    one_loop = module_from_spec(spec)
    spec.loader.exec_module(one_loop)
    rewards = one_loop.main(num_steps=9)
    assert len(capsys.readouterr().out.splitlines()) == 9
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.75
