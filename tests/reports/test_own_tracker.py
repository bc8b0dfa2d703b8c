"""A user's tracker from a file next to the config: it receives every line and group of a run."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import OwnTrackerConfig
from art_cli.loop.train import train
from art_cli.reports.trackers import TrackedRun, make_tracker
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import ConfigError, UsageError
from tests.support.paths import LETTERS, ROOT
from tests.support.servers.receiver import receiving, values

MINE = """
import json

class Mine:
    def __init__(self, run, file):
        self.file = (run.root.parent / file).open("w")
        self.write({"run": run.name, "steps": run.config["train"]["steps"]})

    def write(self, record):
        self.file.write(json.dumps(record) + "\\n")

    def log(self, line):
        self.write({"split": line.split, "step": line.step, "metrics": line.metrics})
        line.metrics.clear()

    def log_trajectories(self, step, groups):
        for group in groups:
            self.write({"step": step, "rewards": {each.id: each.reward for each in group}})
            for each in group:
                each.turns.clear()  # the records are copies, from which nothing is trained

    def close(self):
        self.write("closed")
        self.file.close()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    copy = tmp_path / "project"
    shutil.copytree(LETTERS, copy)
    (copy / "mine.py").write_text(MINE)
    return copy


@pytest.mark.slow
def test_it_sees_every_line_and_every_group_and_changes_nothing(project: Path, tmp_path: Path) -> None:
    own = "{entry: 'mine.py:Mine', options: {file: one}}, {entry: 'mine.py:Mine', options: {file: two}}"
    with receiving() as receiver:
        trackers = f"trackers=[{own}, {{name: otel, url: '{receiver.url}'}}]"
        settings = ["train.steps=2", f"runs={tmp_path}", "name=tracked", trackers]
        tracked = asyncio.run(train(load_config(project / "config.yaml", settings)))

    files = RunDir(tracked.root)
    first, *records, last = map(json.loads, (tmp_path / "one").read_text().splitlines())
    assert (first, last) == ({"run": "tracked", "steps": 2}, "closed")
    assert (tmp_path / "two").read_text() == (tmp_path / "one").read_text()
    lines = [record for record in records if "split" in record]
    assert lines == [{"split": each.split, "step": each.step, "metrics": each.metrics} for each in files.metrics()]
    for step in range(2):
        seen = [record["rewards"] for record in records if record["step"] == step and "rewards" in record]
        assert len(seen) == 3 and all(len(group) == 4 for group in seen)
        assert {id_: reward for group in seen for id_, reward in group.items()} == {
            each.id: each.reward for each in files.scored(step)
        }
    roots = [values(span.attributes) for span in receiver.spans() if not span.parent_span_id]
    played = [each.id for step in range(2) for each in files.scored(step)]
    evaluated = [each.id for step in files.evaluations() for each in read_lines(files.eval_path(step), Trajectory)]
    sent = [(each["art.split"], each["gen_ai.conversation.id"]) for each in roots]
    assert sorted(sent) == sorted([*(("train", id_) for id_ in played), *(("eval", id_) for id_ in evaluated)])
    assert all(each.metrics["grad_norm"] > 0 for each in files.metrics() if each.split == "train")


def test_the_one_on_the_page_works_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        (ROOT / "docs/other-tools.md").read_text().split("```python\n")[1].split("```")[0]
    )
    config = OwnTrackerConfig(name="entry", entry="mine.py:Mine", options={"file": "seen.jsonl"})
    tracker = make_tracker(config, TrackedRun("x", tmp_path, {}), tmp_path)
    tracker.log(MetricsLine(step=0, split="train", metrics={"loss": 0.5}, time=1.0))
    tracker.log_trajectories(1, [[ScoredTrajectory(id="a", group_id="g", group_size=1, index=0, reward=1.0)]])
    tracker.close()
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen == [{"step": 0, "split": "train", "loss": 0.5}, {"id": "a", "reward": 1.0}]


def test_one_that_is_not_there_is_told_before_the_run_begins(project: Path, tmp_path: Path) -> None:
    loaded = load_config(project / "config.yaml", [f"runs={tmp_path}/runs", "trackers=[{entry: 'mine.py:Mein'}]"])
    with pytest.raises(ConfigError, match=r"trackers.0.entry: .*mine.py has no 'Mein'; did you mean 'Mine'\?"):
        asyncio.run(train(loaded))
    (project / "mine.py").write_text("class Half:\n    def __init__(self, run): pass\n    def log(self, line): pass\n")
    loaded = load_config(project / "config.yaml", [f"runs={tmp_path}/runs", "tracker={entry: 'mine.py:Half'}"])
    with pytest.raises(UsageError, match="Half is not a tracker: it lacks the method log_trajectories and no close"):
        asyncio.run(train(loaded))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trackers=[wandbb]", "trackers.0.name: no tracker 'wandbb'; did you mean 'wandb'? There are: "),
        ("trackers=[{name: wandb, projct: x}]", "trackers.0.projct: no such key; did you mean 'project'?"),
        ("trackers=[{entry: 'a.py:T', option: 1}]", "trackers.0.option: no such key; did you mean 'options'?"),
        ("trackers=[{project: x}]", "trackers.0.name: missing: which tracker it is"),
        ("trackers=wandb", 'trackers: expected a list, not "wandb"'),
        ("trackers=[3]", "trackers.0: expected a section of 'key: value' lines, not 3"),
    ],
)
def test_a_mistake_in_the_list_is_told_where_it_stands(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(LETTERS / "config.yaml", [override])
    (only,) = raised.value.problems
    assert str(only).startswith(f"command line: {problem}")
