"""Each tracker with its real package, which also reads the data back: a killed run is resumed and finished.

A killed process makes steps 0 and 1, the resumed process steps 2 and 3.
"""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.others.real_readers import MARKS, PYTHON, answer, run
from tests.support.others.tracked import HOST, USER
from tests.support.paths import ROOT

pytestmark = MARKS

SECTIONS: dict[str, dict[str, Any]] = {
    "tensorboard": {},
    "trackio": {},
    "mlflow": {"checkpoint_every": 1},
    "wandb": {"mode": "offline", "checkpoint_every": 1},
}
ONLINE = {"wandb": {"mode": "online"}}  # resumed without a W&B key, therefore also written to files
EACH_STEP = [0, 1, 2, 3]


@pytest.fixture(scope="module", params=SECTIONS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """(tracker, data read by its package, directory of its files)"""
    name, home = request.param, tmp_path_factory.mktemp(request.param)
    root, section = home / "runs/mail", json.dumps(SECTIONS[request.param])
    child = ("-m", "tests.support.others.tracked", name, str(root))
    killed = run(*child, section, "0", "kill", home=home)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    ended = run(*child, json.dumps({**SECTIONS[name], **ONLINE.get(name, {})}), "2", home=home)
    assert ("No API key" in ended.stderr and "wandb sync sends it" in ended.stderr) == (name in ONLINE), ended.stderr
    assert ended.returncode == 0 and ended.stdout.count("\n") == 1, (ended.stdout, ended.stderr[-2000:])
    return name, json.loads(ended.stdout), home


def test_no_package_is_told_of_the_machine_the_code_or_the_user(seen: tuple[str, Any, Path]) -> None:
    """In names and bytes of all files but W&B's logs, which stay. Paths are there only where files have to be found."""
    name, found, home = seen
    child = "tests.support.others.tracked"
    secret = [HOST, USER, str(ROOT), str(PYTHON.parent), child, "opentelemetry-proto", str(home)]
    stays = re.compile(re.escape(str(home).encode()) + rb"/(artifacts/staging|runs/mlflow|mlruns)")
    files = [path for path in home.rglob("*") if path.is_file() and not path.name.startswith("debug")]
    assert files
    for path in files:
        held = str(path.relative_to(home)).encode() + stays.sub(b"", path.read_bytes())
        assert [word for word in secret if word.encode() in held] == [], path
    assert name != "wandb" or (found["hosts"], found["environments"]) == (["", ""], 0)


def test_the_package_reads_both_halves_as_one_run(seen: tuple[str, Any, Path]) -> None:
    name, found, _ = seen
    {"tensorboard": _tensorboard, "trackio": _trackio, "mlflow": _mlflow, "wandb": _wandb}[name](found)


def _tensorboard(found: Any) -> None:
    assert found["plugins"] == {
        **{f"{split}/samples": "text" for split in ("train", "eval")},
        **{f"{split}/rewards": "histograms" for split in ("train", "eval")},
        "train/loss": "scalars", "train/a b|c": "scalars", "eval/reward": "scalars",
    }  # fmt: skip
    assert found["values"]["train/loss"] == [[step, 0.5 - step] for step in EACH_STEP]
    assert found["values"]["eval/reward"] == [[2, 0.25], [4, 0.25]]
    for step, buckets in found["values"]["train/rewards"]:
        held = [(low, high, count) for low, high, count in buckets if count]
        assert [count for *_, count in held] == [1.0, 1.0] and held[0][0] == 0.25 and held[1][1] == 1.0, step
    assert [step for step, _ in found["text"]["train/samples"]] == EACH_STEP
    ((_, (text,)), *_) = found["text"]["train/samples"]
    assert text.startswith("**1** of `s0-g0-1`") and "    Who wrote about cheese?\n\n    It was Ann." in text


def _trackio(found: Any) -> None:
    assert found["name"].startswith("mail-") and found["config"]["train"] == {"steps": 2}
    losses = [(log["step"], log["train/loss"]) for log in found["logs"] if "train/loss" in log]
    assert losses == [(step, 0.5 - step) for step in EACH_STEP]
    assert [(log["step"], log["eval/reward"]) for log in found["logs"] if "eval/reward" in log] == [
        (2, 0.25),
        (4, 0.25),
    ]
    counts = [sum(log["train/rewards"]["values"]) for log in found["logs"] if "train/rewards" in log]
    assert counts == [2, 2, 2, 2]
    assert len(found["traces"]) == 2 * len(EACH_STEP) + 2 * 2
    trace = found["traces"][0]
    assert [each["role"] for each in trace["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert trace["messages"][2]["tool_calls"][0]["function"]["name"] == "search"
    assert trace["metadata"]["reward"] == 1.0 and trace["metadata"]["duration_ms"] == 10_000


def _mlflow(found: Any) -> None:
    assert (found["num_runs"], found["name"], found["status"]) == (1, "mail", "FINISHED")
    assert found["params"] == {"name": "mail", "train.steps": "2", "model.base": "builtin:tiny", "note": "null"}
    assert found["history"] == {
        "train/loss": [[step, 0.5 - step] for step in EACH_STEP],
        "train/a b_c": [[step, 2.0] for step in EACH_STEP],
        "eval/reward": [[2, 0.25], [4, 0.25]],
    }
    tables = [
        f"samples/{split}-{step:04d}.json"
        for split, steps in (("eval", (2, 4)), ("train", EACH_STEP))
        for step in steps
    ]
    assert [name for name in found["files"] if name.startswith("samples/")] == tables
    assert {each["path"] for each in json.loads(found["tags"]["mlflow.loggedArtifacts"])} == set(tables)
    assert [name for name in found["files"] if name.startswith("checkpoints/")] == [
        "checkpoints/step_0002", "checkpoints/step_0002/manifest.json", "checkpoints/step_0004",
    ]  # fmt: skip
    table = found["table"]
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (first["trajectory"], first["reward"], first["reply"]) == ("s0-g0-1", 1.0, "It was Ann.")


def _wandb(found: Any) -> None:
    assert found["num_files"] == 2 and len(set(found["ids"])) == 1
    assert found["configs"][0]["train"] == {"steps": 2}
    losses = [(row["step"], row["train/loss"]) for row in found["rows"] if "train/loss" in row]
    assert losses == [(step, 0.5 - step) for step in EACH_STEP]
    assert [row["eval/reward"] for row in found["rows"] if "eval/reward" in row] == [0.25, 0.25]
    assert [sum(row["train/rewards/values"]) for row in found["rows"] if "train/rewards/values" in row] == [2, 2, 2, 2]
    sent = {tuple(sorted(each["aliases"])): each for each in found["artifacts"] if each["type"] == "model"}
    assert set(sent) == {("latest", "step-2"), ("latest", "step-4")}
    assert all(each["files"] == ["manifest.json"] and each["name"] == "mail-checkpoint" for each in sent.values())
    assert len(found["tables"]) == len(EACH_STEP) + 2
    assert {(row[2], row[3]) for table in found["tables"] for row in table["data"]} >= {
        ("s0-g0-1", 1.0),
        ("s3-g0-0", 0.25),
    }


def test_the_scores_and_attributes_of_langfuse_are_those_of_its_sdk(tmp_path: Path) -> None:
    """Its own models take our scores, and our names of attributes are its constants."""
    program = """
import json
from langfuse.api.core.pydantic_utilities import parse_obj_as
from langfuse.api.scores.types.create_score_request import CreateScoreRequest
from langfuse._client.attributes import LangfuseOtelSpanAttributes as known
from art_cli.formats.traces.spans import TracedRun
from art_cli.reports.trackers.otel import observations, scores_of
from tests.support.records.attempts import scored
source, one = TracedRun("mail", "id", "model"), scored(error="timeout: x")
taken = [parse_obj_as(CreateScoreRequest, each) for each in scores_of(one, source, "train")]
extra = [each.model_extra for each in taken]
names = {name for span in observations(one, source, "train") for name in span.attributes}
constants = {value for name, value in vars(known).items() if name.isupper()}
own = sorted(name for name in names if name.startswith(("langfuse.", "session.")))
print(json.dumps([[each.name for each in taken], extra, [name for name in own if name not in constants], len(own)]))
"""
    names, extra, unknown, num = answer("-c", program, home=tmp_path)
    assert names == ["reward", "judge.ruler", "metric.found"] and unknown == [] and num >= 10
    assert not any(extra)
