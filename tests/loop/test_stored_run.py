"""A run written by an older art can be resumed, reported, viewed and served.

stored_run.tar.gz is `art train tests/letters/config.yaml train.steps=2`, written by an older art, without logs.
"""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.runs.run_dir import RunDir
from art_cli.serving.served_model import find_source
from tests.support.paths import LETTERS
from tests.support.servers.serving import client, say, serving

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("stored_run.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "letters"


def test_a_stored_run_goes_on_with_its_third_step(stored: Path, art: Art) -> None:
    run = RunDir(stored)
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file() and "/step_" in str(path)}
    code, _, err = art("train", LETTERS / "config.yaml", f"runs={stored.parent}", "train.steps=3")
    assert code == 0, err
    assert "step 3/3" in err and "step 2/3" not in err
    assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
    assert {path.name for path in before if path.exists()} >= {"trajectories.jsonl", "scored.jsonl", "manifest.json"}
    new, old = (run.checkpoint_path(step) / "adapter_model.safetensors" for step in (3, 2))
    assert new.read_bytes() != old.read_bytes()
    assert len(run.trajectories(2)) == 12
    config = json.loads(run.config_path.read_text())  # the defaults of the older art
    assert config["loss"]["scale_advantages"] and config["train"]["max_kl"] is None and config["changes"] == []


def test_a_stored_run_is_reported_and_viewed(stored: Path, art: Art, tmp_path: Path) -> None:
    code, out, err = art("report", stored)
    assert code == 0 and "reward" in out, err
    code, _, err = art("view", stored, "--html", tmp_path / "run.html")
    assert code == 0 and (tmp_path / "run.html").stat().st_size > 10_000, err


async def test_a_stored_run_is_served(stored: Path) -> None:
    async with serving(find_source(str(stored), which="newest")) as (service, root), client(root) as ai:
        assert await say(ai, "letters", max_tokens=4)
        assert service.policies.served["letters"].source.step == 2
