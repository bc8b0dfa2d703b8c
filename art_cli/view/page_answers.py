"""The answers to the page's URLs as plain data: groups, attempts, turns, and numbers from `art report`.

Methods may take a moment and run in threads. Names in URLs are looked up in the index and never used as paths. Reads
run files; writes only a person's labels.

Steps are numbered like directories: the groups of step 3 are in step_0003, and lead to update 4 in `art report`.
"""

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from art_cli.reports.findings import RunFinding
from art_cli.reports.pages.plan_text import plan_sections
from art_cli.reports.pages.report_text import KINDS, promised_cells, promised_rows
from art_cli.reports.run_report import RunReport, read_report
from art_cli.runs.durable import read_object
from art_cli.runs.history import sound
from art_cli.runs.intervals import mean_interval
from art_cli.runs.json_lines import is_inside
from art_cli.runs.promise import Promise
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import Json, ScoredTrajectory
from art_cli.runtime.errors import ArtError, printable
from art_cli.view.drawing import DrawingKind, drawing_kind, drawing_page
from art_cli.view.group_rows import (
    MAX_ATTEMPTS,
    Histogram,
    Query,
    RowPage,
    build_tree,
    find_groups,
    histogram,
    words_of,
)
from art_cli.view.index import Index, IndexedStep, Split
from art_cli.view.records import feedback_on, learned_numbers, read_record
from art_cli.view.rows import IndexRow, number_of
from art_cli.view.segments import TokenTexts, find_tokenizer, show_turns
from art_cli.view.sources import Sources, ViewSource

if TYPE_CHECKING:
    from art_cli.judges.files.person_labels import PersonLabels

PAUSE = "pause"  # split of pause lines, which contain no metrics
SMOOTHED = "reward_smoothed"  # the training reward smoothed by `art report`, with its interval
LOOK_S = 1.0  # files are checked for changes at most this often
FIND_S = 5.0  # longest wait for a trajectory that is not yet indexed
MAX_SCENARIO_ATTEMPTS = 500
MAX_REPLY = 20_000  # characters of an attempt in a comparison over steps
# fields of a record shown in its group
SHOWN = ("returned_reward", "error", "limit", "metrics", "scores", "shadow", "duration_s", "noise")
_WITHOUT_TURNS = tuple(name for name in ScoredTrajectory.__struct_fields__ if name != "turns")


def _no_numbers() -> Json:
    return {"config": None, "metrics": {}, "intervals": {}, "evaluations": [], "findings": [], "checkpoints": [],
            "best_step": None, "stages": {}, "problems": []}  # fmt: skip


def run_numbers(run: RunDir) -> Json:
    """Returns a run's numbers. Unreadable parts are skipped and listed under `problems`."""
    found = _no_numbers() | {"plan": None}
    try:
        found["config"] = read_object(run.config_path, within=run.root) if run.config_path.exists() else None
    except ArtError as error:
        found["problems"].append(str(error))
    try:
        lines, report = run.metrics(), read_report(run)
    except ArtError as error:
        found["problems"].append(str(error))
        return found
    try:
        found["plan"] = None if (promise := run.promise()) is None else _plan(promise, report)
    except ArtError as error:
        found["problems"].append(str(error))
    curves = _curves(lines)
    times = curves.get("train", {})  # seconds of each stage by step
    found |= {
        "metrics": curves,
        "stages": {name: times[f"{name}_s"] for name in ("sample", "judge", "train") if f"{name}_s" in times},
        "findings": [_finding(each) for each in report.findings],
        "checkpoints": run.checkpoint_steps(),
        "best_step": report.best.step if report.best is not None else None,
        "evaluations": _evaluations(run, report),
        "pauses": [{"step": line.step, "rules": sound(line.metrics)} for line in lines if line.split == PAUSE],
        "reward_names": report.reward_names,
        "report": msgspec.to_builtins(report),
    }
    found["intervals"] = _intervals(report, found["evaluations"])
    found["metrics"].setdefault("train", {})[SMOOTHED] = [[p.step - 1, p.mean] for p in report.training_reward]
    return found


def file_numbers(index: Index) -> Json:
    """Returns the numbers for a plain file: each step's mean reward."""
    curves: dict[str, list[list[float | None]]] = {}
    for step in index.steps():
        if (mean := step.numbers().mean_reward) is not None:
            curves.setdefault(step.split, []).append([step.step, mean])
    metrics = {split: {"reward_mean": points} for split, points in curves.items()}
    return _no_numbers() | {"metrics": metrics}


def _curves(lines: list[MetricsLine]) -> Json:
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for line in sorted(lines, key=lambda line: line.step):
        for name, value in sound(line.metrics).items() if line.split != PAUSE else ():
            curves.setdefault(line.split, {}).setdefault(name, []).append([line.step, value])
    return dict(curves)


def _plan(promise: Promise, report: RunReport) -> Json:
    """Returns the questions, pilots and numbers of `art plan`, with actual values if known."""
    plain = msgspec.to_builtins(promise)
    expected = [[name, *promised_cells(name, each)] for name, each in plain["expected"].items()]
    return {
        "sections": plan_sections(promise),
        "pilots": plain["measured"]["pilots"],
        "expected": promised_rows(msgspec.to_builtins(report)) or [["", "promised", "80 % interval"], *expected],
    }


def _finding(finding: RunFinding) -> Json:
    """Returns the finding as in `art report --json`, with a title and the groups' location."""
    is_evaluation = finding.kind == "evaluation_fell"
    step = finding.step if is_evaluation else max(0, finding.step - 1)
    at = {"step": step, "split": "eval" if is_evaluation else "train"}
    return {**msgspec.to_builtins(finding), "title": KINDS[finding.kind], "cures": finding.cures, "at": at}


def _evaluations(run: RunDir, report: RunReport) -> list[Json]:
    """Returns every metric of every evaluation, with intervals from the scenarios' values."""
    found = []
    for each in report.evaluations:
        values = _values(run, each.step)
        metrics = dict(each.metrics) | ({"reward": each.reward.mean} if each.reward is not None else {})
        for name, mean in metrics.items():
            numbers = [value for value in values.get(name, {}).values() if math.isfinite(value)]
            interval = mean_interval(numbers)
            low, high = (interval.low, interval.high) if interval is not None else (None, None)
            found.append({"step": each.step, "metric": name, "mean": mean, "low": low, "high": high, "n": len(numbers)})
    return found


def _values(run: RunDir, step: int) -> Mapping[str, Mapping[str, float]]:
    try:
        evaluation = run.evaluation(step)
    except ArtError:
        return {}
    return evaluation.values if evaluation is not None else {}


def _intervals(report: RunReport, evaluations: list[Json]) -> Json:
    bands: dict[str, list[list[float]]] = {}
    for each in evaluations:
        if each["low"] is not None:
            bands.setdefault(each["metric"], []).append([each["step"], each["low"], each["high"]])
    smoothed = [[p.step - 1, p.low, p.high] for p in report.training_reward if p.low is not None]
    return {"eval": bands, "train": {SMOOTHED: smoothed}}


class NotThere(Exception):
    """Nothing exists under this URL; `str()` is the message."""


class Answers:
    """The page's answers. `has_chat` is True with a chat endpoint."""

    def __init__(self, sources: Sources, *, has_chat: bool = False, drawing: Path | None = None) -> None:
        self._sources = sources
        self._has_chat = has_chat
        self._drawing = drawing
        self._tokenizers: dict[str, TokenTexts | None] = {}
        self._numbers: dict[str, tuple[object, Json]] = {}
        self._labels: dict[Path, tuple[int, PersonLabels]] = {}  # scored file -> (size, labels)
        self._labelling = threading.Lock()
        self._looking = threading.Lock()
        self._looked = time.monotonic()
        self._wakes = threading.Event()
        self._is_closed = False
        self._known_state: object = None
        self._num_changes = 0  # the revision
        self.shows_found = True  # True if drawings found in a run are offered
        self.left_out = 0  # trajectories missing from a page file

    # --- the index in the background ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads the files in a thread, now and whenever `look` finds changes."""
        self._wakes.set()
        threading.Thread(target=self._read, name="view index", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        self._wakes.set()

    def _read(self) -> None:
        while True:
            self._wakes.wait()
            self._wakes.clear()
            for source in self._sources.all():
                while not self._is_closed and not source.index.read(time.monotonic() + 0.2):
                    time.sleep(0.001)  # gives the event loop and other threads a chance to run
            if self._is_closed:
                return

    def read_all(self) -> None:
        while not all([source.index.read(time.monotonic() + 1.0) for source in self._sources.all()]):
            pass

    def all(self) -> list[ViewSource]:
        return self._sources.all()

    def look(self) -> None:
        """Checks the files for changes, unless checked a moment ago."""
        with self._looking:
            if time.monotonic() - self._looked < LOOK_S:
                return
            if self._sources.look():
                self._wakes.set()
            self._looked = time.monotonic()

    # --- sources ------------------------------------------------------------------------------------------------------

    def revision(self) -> Json:
        self.look()
        return {"revision": self._revision()}

    def _revision(self) -> int:
        """Increases with any change: rows, a run's numbers, or its running state."""
        state = [_state(source) for source in self._sources.all()]
        with self._looking:
            if state != self._known_state:
                self._known_state, self._num_changes = state, self._num_changes + 1
            return self._num_changes

    def sources(self) -> Json:
        self.look()
        return {
            "revision": self._revision(),
            "left_out": self.left_out,
            "chat": self._has_chat,
            "sources": [self._source(source) for source in self._sources.all()],
        }

    def _source(self, source: ViewSource) -> Json:
        done, total = source.index.num_bytes
        steps = [self._step(step) for step in source.index.steps()]
        return {
            "id": source.id,
            "name": printable(source.name),
            "path": printable(source.path),
            "kind": source.kind,
            "is_running": source.is_running,
            "indexing": {"done_bytes": done, "bytes": total} if done < total else None,
            "num_trajectories": sum(step["num_trajectories"] for step in steps),
            "drawing": self.drawing_kind(source),
            "has_plan": source.run is not None and source.run.promise_path.exists(),
            "steps": steps,
        }

    def _step(self, step: IndexedStep) -> Json:
        done, total = step.num_bytes
        return {"step": step.step, "split": step.split, **step.numbers()._asdict(), "is_indexed": done >= total,
                "problems": list(step.problems)}  # fmt: skip

    def source(self, name: str) -> Json:
        source = self._find_source(name)
        if source.run is None:
            return {**file_numbers(source.index), "drawing": self.drawing_kind(source), "judge": self._judged(source)}
        stamp = (_stamps(source.run), len(source.run.checkpoint_steps()))
        known = self._numbers.get(name)
        if known is None or known[0] != stamp:
            known = self._numbers[name] = (stamp, run_numbers(source.run))
        return {**known[1], "drawing": self.drawing_kind(source), "judge": self._judged(source)}

    def _judged(self, source: ViewSource) -> Json | None:
        """Returns the steps with a judge's report, which are the scored steps."""
        steps = [step.step for step in source.index.steps() if step.split == "train" and step.has_scores]
        return {"steps": steps} if steps else None

    def judge(self, name: str, number: int) -> Json:
        """Returns the output of `art judge --report --json` for a step's scored file."""
        # needs numpy, unlike the rest of the page
        from art_cli.judges.judge_report import make_report, report_lines

        path = _scored(self._find_step(name, number, "train"))
        if path is None:
            raise NotThere(f"step {number} has no scored file")
        try:
            report, _ = make_report(path)
        except ArtError as error:
            raise NotThere(str(error)) from error
        lines = [[line, printable(value)] for line, value in report_lines(report)]
        plain = {**msgspec.to_builtins(report), "path": printable(report.path)}
        return {"step": number, "report": plain, "values": report.values(), "lines": lines}

    # --- labels of a person -------------------------------------------------------------------------------------------

    def labels(self, name: str, number: int, split: Split, answer: bytes = b"") -> Json:
        """Writes the answer (a PairLabel), if any, then returns the next pair and the report."""
        from art_cli.judges.files.person_labels import PairLabel, PersonLabels

        path = _scored(self._find_step(name, number, split))
        if path is None:
            raise NotThere(f"step {number} has no scored file")
        with self._labelling:
            try:
                size, labels = self._labels.get(path) or (-1, None)
                if labels is None or size != _size(path):
                    self._labels[path] = _size(path), (labels := PersonLabels(path))
                labels.read()
                if answer:
                    given = msgspec.json.decode(answer, type=PairLabel)
                    labels.answer(given.pair, given.verdict)
                    self._numbers.pop(name, None)  # findings may have changed
                return {"pair": (pair := labels.next()) and pair._asdict(), "lines": labels.report().lines()}
            except (ArtError, OSError, ValueError, RecursionError) as error:
                raise NotThere(str(error)) from error

    def drawing_kind(self, source: ViewSource) -> DrawingKind | None:
        kind = drawing_kind(source, self._drawing)
        return kind if kind == "given" or self.shows_found else None

    def drawing(self, name: str) -> str:
        page = drawing_page(self._find_source(name), self._drawing)
        if page is None:
            raise NotThere("this run brings no drawing (view.js)")
        return page

    # --- groups -------------------------------------------------------------------------------------------------------

    def groups(self, name: str, number: int, split: Split, query: Query) -> RowPage:
        return find_groups(self._find_step(name, number, split), query)

    def histogram(self, name: str, number: int, split: Split) -> Histogram:
        return histogram(self._find_step(name, number, split))

    def group(self, name: str, number: int, split: Split, group_id: str) -> Json:
        step = self._find_step(name, number, split)
        group = step.group(group_id)
        if group is None:
            raise NotThere(f"no group {printable(group_id, limit=80)} in step {number} ({split})")
        names = step.names()
        place = names.index(group.id)
        rows = group.rows[:MAX_ATTEMPTS]
        records = [read_record(step, row) for row in rows]
        return {
            "group_id": group.id,
            "label": group.label,
            "scenario": records[0].scenario,
            "scenario_id": rows[0].scenario if "id" in records[0].scenario else None,
            "previous": names[place - 1] if place > 0 else None,
            "next": names[place + 1] if place + 1 < len(names) else None,
            "num_attempts": len(group.rows),
            "attempts": [_attempt(row, record) for row, record in zip(rows, records, strict=True)],
            "tree": build_tree(records),
        }

    def trajectory(self, name: str, trajectory: str) -> Json:
        source = self._find_source(name)
        step, row = self._find_row(source, trajectory)
        record = read_record(step, row)
        if feedback := feedback_on(step.path_of(row), row.id, within=step.root):
            record.metadata = {**record.metadata, "feedback": feedback}
        group = step.group(row.group)
        ids = [each.id for each in group.rows] if group is not None else [row.id]
        place = ids.index(row.id) if row.id in ids else 0
        texts = self._texts(source) if record.turns else None
        learned = learned_numbers(step.path_of(row).with_name("learned.jsonl"), row.id, within=step.root)
        return {
            "trajectory": {
                name: value for name in _WITHOUT_TURNS if (value := getattr(record, name)) is not msgspec.UNSET
            }
            | {"limit": record.ended_by},
            "step": step.step,
            "split": step.split,
            "group_id": row.group,
            "scenario_id": row.scenario if "id" in record.scenario else None,
            "previous": ids[place - 1] if place > 0 else None,
            "next": ids[place + 1] if place + 1 < len(ids) else None,
            "turns": show_turns(record, texts, learned),
            "has_tokens": texts is not None,
            "loss": number_of(learned.get("loss")),
            "update": learned.get("update"),
            "left_out": learned.get("left_out"),
            "masked": learned.get("masked"),
        }

    def scenario(self, name: str, scenario: str) -> Json:
        """Returns a scenario's attempts by step; above 500 attempts, a regular subsample."""
        source = self._find_source(name)
        found = [(step, row) for step in source.index.steps() for row in step.rows() if row.scenario == scenario]
        if not found:
            raise NotThere(f"no scenario {printable(scenario, limit=80)} in this source")
        every = -(-len(found) // MAX_SCENARIO_ATTEMPTS)
        return {"attempts": [self._reply(step, row) for step, row in found[::every]], "num_attempts": len(found)}

    def _reply(self, step: IndexedStep, row: IndexRow) -> Json:
        record = read_record(step, row)
        conversations = [*record.branches, record.messages]
        words = [f"{message.get('role')}: {words_of(message)}" for each in conversations for message in each]
        return {
            "step": step.step,
            "split": step.split,
            "id": row.id,
            "reward": row.reward,
            "error": record.error,
            "reply": "\n\n".join(words)[:MAX_REPLY],
        }

    # --- finding ------------------------------------------------------------------------------------------------------

    def _find_source(self, name: str) -> ViewSource:
        source = self._sources.get(name)
        if source is None:
            raise NotThere(f"no source {printable(name, limit=80)}")
        return source

    def _find_step(self, name: str, number: int, split: Split) -> IndexedStep:
        self.look()
        step = self._find_source(name).index.step(number, split)
        if step is None:
            raise NotThere(f"no step {number} ({split}) in this source")
        step.advance()
        return step

    def _find_row(self, source: ViewSource, trajectory: str) -> tuple[IndexedStep, IndexRow]:
        """Waits for the index, because a link may be opened before the index is complete."""
        until = time.monotonic() + FIND_S
        while (found := source.index.find(trajectory)) is None:
            is_read = source.index.read(min(until, time.monotonic() + 0.1))
            if (is_read or time.monotonic() > until) and source.index.find(trajectory) is None:
                raise NotThere(f"no trajectory {printable(trajectory, limit=80)} in this source")
        return found

    def _texts(self, source: ViewSource) -> TokenTexts | None:
        if source.id not in self._tokenizers:
            self._tokenizers[source.id] = find_tokenizer(source.run)
        return self._tokenizers[source.id]


def _attempt(row: IndexRow, record: ScoredTrajectory) -> Json:
    indexed = {name: getattr(row, name) for name in ("id", "index", "reward", "num_turns", "num_tokens")}
    return indexed | {name: getattr(record, name) for name in SHOWN} | {"limit": record.ended_by}


def _scored(step: IndexedStep) -> Path | None:
    for path in reversed(step.paths):
        if path.name != "trajectories.jsonl" and is_inside(path, step.root):
            return path
    return None


def _state(source: ViewSource) -> object:
    """Returns a value that changes when the page needs updating."""
    stamps = [] if source.run is None else _stamps(source.run)
    return source.id, source.index.revision, source.index.num_bytes, source.is_running, stamps


def _stamps(run: RunDir) -> list[object]:
    """Returns values that change with the run's number files. A promise may change without changing size."""
    with contextlib.suppress(OSError):
        return [_size(run.metrics_path), _size(run.config_path), run.promise_path.stat().st_mtime_ns]
    return [_size(run.metrics_path), _size(run.config_path)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
