"""Runs in the Python of the trackers' packages: writes with a tracker of ours, and reads with the package's own reader.

    python -m tests.support.others.tracked NAME ROOT SECTION STEP [kill]

It logs two steps, an evaluation and a checkpoint, closes the tracker, and prints what the package sees, as JSON. With
`kill` the process ends by SIGKILL once everything is logged, before `close`.
"""

import contextlib
import json
import os
import platform
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from art_cli.config.schema import TrackerConfig
from art_cli.reports.trackers import TrackedRun, make_tracker
from art_cli.runs.run_dir import MetricsLine
from tests.support.records.attempts import attempt, scored

CONFIG: dict[str, Any] = {"name": "mail", "train": {"steps": 2}, "model": {"base": "builtin:tiny"}, "note": None}
HOST, USER = "machine-of-a-user", "user-of-a-machine"  # what packages find where they ask for these


def write(name: str, root: Path, section: str, first: str, ends: str = "") -> None:
    """Logs two steps from `first` on, then an evaluation, a checkpoint, and before it one that is gone."""
    config = TypeAdapter(TrackerConfig).validate_python({"name": name, **json.loads(section)})
    begin = int(first)
    socket.gethostname = platform.node = lambda: HOST
    os.environ.update(USER=USER, LOGNAME=USER, USERNAME=USER)
    (root / "logs").mkdir(parents=True, exist_ok=True)
    checkpoint = root / f"checkpoints/step_{begin + 2:04d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    tracker: Any = make_tracker(config, TrackedRun("mail", root, CONFIG), root)
    for step in range(begin, begin + 2):
        tracker.log_trajectories(step, [[scored(f"s{step}-g0", 0, 0.25), scored(f"s{step}-g0", 1, 1.0)]])
        metrics = {"loss": 0.5 - step, "a b|c": 2.0}
        tracker.log(MetricsLine(step=step, split="train", metrics=metrics, time=1.7e9 + step))
    tracker.log_evaluation(begin + 2, [[attempt(f"e{begin + 2}-g0", index) for index in range(2)]])
    if hasattr(tracker, "log_checkpoint"):
        tracker.log_checkpoint(begin + 1, root / "nowhere")
        tracker.log_checkpoint(begin + 2, checkpoint)
    tracker.log(MetricsLine(step=begin + 2, split="eval", metrics={"reward": 0.25}, time=1.7e9 + 9))
    if ends == "kill":
        _wait_until_seen(name, root, num=1)  # trackio's own thread writes twice a second, W&B's process once a second
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close()
    if name == "wandb":  # on a busy machine its process still writes after `finish`
        _wait_until_seen(name, root, num=2 if begin else 1)
    sys.stdout.write(json.dumps(READERS[name](root), default=str) + "\n")


def _wait_until_seen(name: str, root: Path, *, num: int) -> None:
    """Until the package's reader sees the last line of `num` runs, in files that may be half written."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(Exception):
            found = READERS[name](root)  # of W&B, whose summary names the metric too, only the rows count
            if json.dumps(found.get("rows", found), default=str).count("eval/reward") >= num:
                return
    raise TimeoutError(f"{name} has not written what was logged")


# --- what the packages see --------------------------------------------------------------------------------------------


def read_tensorboard(root: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    seen = EventAccumulator(str(root / "tensorboard"), size_guidance={"tensors": 0})
    seen.Reload()
    tensors = {tag: [(each.step, make_ndarray(each.tensor_proto)) for each in seen.Tensors(tag)]
               for tag in seen.Tags()["tensors"]}  # fmt: skip
    shown = {tag: [(step, value.tolist()) for step, value in found] for tag, found in tensors.items()}
    plugins = {tag: seen.SummaryMetadata(tag).plugin_data.plugin_name for tag in tensors}
    text = {tag: [(step, [each.decode() for each in value.flatten()]) for step, value in found]
            for tag, found in tensors.items() if plugins[tag] == "text"}  # fmt: skip
    return {"plugins": plugins, "values": {tag: shown[tag] for tag in tensors if tag not in text}, "text": text}


def read_mlflow(root: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("art")
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    id_ = run.info.run_id
    history = {name: [(m.step, m.value) for m in client.get_metric_history(id_, name)] for name in run.data.metrics}
    folders = ["samples", "rewards", "checkpoints", "checkpoints/step_0002"]
    files = sorted(each.path for folder in folders for each in client.list_artifacts(id_, folder))
    table = json.loads(Path(client.download_artifacts(id_, "samples/train-0000.json", str(root))).read_text())
    return {"num_runs": len(runs), "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
            "history": history, "files": files, "table": table, "tags": run.data.tags}  # fmt: skip


def read_trackio(root: Path) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("art")
    return {"name": name, "config": SQLiteStorage.get_run_config("art", name),
            "logs": SQLiteStorage.get_logs("art", name),
            "traces": SQLiteStorage.get_traces("art", name, sort="step_asc")}  # fmt: skip


def read_wandb(root: Path) -> dict[str, Any]:
    """The records of every offline file, decoded by W&B's own messages."""
    files = sorted((root / "logs/wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in _wandb_records(file)]
    configs = [{each.key: json.loads(each.value_json) for each in record.run.config.update}
               for record in records if record.HasField("run")]  # fmt: skip
    rows = [{each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
            for record in records if record.HasField("history")]  # fmt: skip
    sent = [record.request.log_artifact.artifact for record in records if record.HasField("request")]
    sent += [record.artifact for record in records if record.HasField("artifact")]
    artifacts = [{"name": each.name, "type": each.type, "aliases": [*each.aliases],
                  "files": [entry.path for entry in each.manifest.contents]} for each in sent if each.name]  # fmt: skip
    tables = [
        json.loads(path.read_text()) for path in root.glob("logs/wandb/offline-run-*/files/media/table/**/*.json")
    ]
    return {"ids": [record.run.run_id for record in records if record.HasField("run")], "configs": configs,
            "hosts": [record.run.host for record in records if record.HasField("run")],
            "environments": sum(record.HasField("environment") for record in records),
            "rows": rows, "artifacts": artifacts, "tables": tables, "num_files": len(files)}  # fmt: skip


def _wandb_records(file: Path) -> Iterator[Any]:
    """W&B's file is a log of LevelDB's form: blocks of 32 KiB, and before each piece its checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, place, pieces = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio, "wandb": read_wandb,
}  # fmt: skip

if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
