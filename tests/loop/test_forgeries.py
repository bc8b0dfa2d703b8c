"""Each forgery of benchmarks/attacks/forgeries.py is found by `art prove`, or docs/safety.md does not promise it."""

import asyncio
from pathlib import Path

import pytest

from art_cli.cli import app as cli
from art_cli.config.compose import load_config
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from benchmarks.attacks.forgeries import FORGERIES, Forgery, is_found
from tests.support.paths import LETTERS

CONFIG = LETTERS / "config.yaml"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    runs = tmp_path_factory.mktemp("runs")
    return RunDir(asyncio.run(train(load_config(CONFIG, [f"runs={runs}", "train.keep_checkpoints=9"]))).root)


def named(forgery: Forgery) -> str:
    return f"{forgery.number}-{forgery.by}-{forgery.name}".lstrip("-").replace(" ", "_")


@pytest.mark.parametrize("forgery", [
    pytest.param(each, id=named(each), marks=[pytest.mark.slow] if each.by == "replay" else []) for each in FORGERIES
])  # fmt: skip
def test_a_forgery_is_found_exactly_where_it_is_promised(
    forgery: Forgery, honest: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = is_found(forgery, honest, tmp_path, lambda *words: cli.run([*words]), CONFIG)
    out, err = capfd.readouterr()
    assert found is forgery.is_promised, out + err
    assert err.count("error: ") == found and "bug in art" not in err


@pytest.mark.slow
def test_an_honest_run_is_proven_wherever_it_lies(
    honest: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """M4: copied, named by a relative path: every byte is the same."""
    honest_copy = Forgery("nothing", "M4", "replay", lambda run: None)
    assert not is_found(honest_copy, honest, tmp_path, lambda *words: cli.run([*words]), CONFIG)
    out = capfd.readouterr().out
    assert out.count("same bytes") == 5 and "replayed 4 of 4 updates" in out
