"""A new user's first day: what commands say when something is not as the user believes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.loop.failures import count_failures
from art_cli.trajectory import Trajectory

LETTERS = Path(__file__).parent / "letters"
SMALL = ["rollout.groups_per_step=1", "rollout.group_size=4", "rollout.concurrency=1"]

Art = Callable[..., tuple[int, str, str]]

FAILING = """
num = 0
async def rollout(policy, scenario):
    global num
    num += 1
    if num % 4 != {spared}:
        raise KeyError(f"no tool {{num}}" if num % 4 else "rare")
    await policy.client.chat.completions.create(model=policy.model, messages=[{{"role": "user", "content": "hi"}}])
    return 1.0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The letters task in a directory of its own; a test puts another rollout there."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    build = (
        (tmp_path / "build.py").read_text().replace("Path(__file__).parent.parent", f"Path({str(LETTERS.parent)!r})")
    )
    (tmp_path / "build.py").write_text(build)
    return tmp_path


# --- art generate: failures are told ----------------------------------------------------------------------------------


def test_generate_fails_where_every_attempt_failed_and_says_why(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(FAILING.format(spared=9))
    code, out, err = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl")
    assert code == 1
    assert f"{project / 'out.jsonl'}: 4 trajectories; 4 of 4 failed, 3 of them with " in out
    assert "no tool 1" in out
    assert err.splitlines()[-1].startswith(f"error: {project / 'out.jsonl'}: every attempt failed: 4 of 4 failed, 3 of")


def test_generate_counts_the_failures_among_what_it_played(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(FAILING.format(spared=0))
    code, out, _ = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl", "--json")
    row = json.loads(out)
    assert (code, row["trajectories"], row["failed"], row["num_alike"]) == (0, 4, 3, 3)
    assert "no tool 1" in row["commonest_cause"]
    code, out, _ = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl")
    assert (code, "3 of 4 failed, 3 of them with" in out) == (0, True)


def test_the_commonest_cause_is_found_whatever_numbers_it_names() -> None:
    errors = ["rare: x", "timeout: 600 s", "timeout: 601 s", None]
    played = [Trajectory(id=str(i), group_id="g", group_size=4, index=i, error=e) for i, e in enumerate(errors)]
    failures = count_failures(played)
    assert str(failures) == "3 of 4 failed, 2 of them with timeout: 600 s"
    assert not failures.is_all
    assert not count_failures([]).is_all
    assert str(count_failures(played[:1])) == "1 of 1 failed with rare: x"
