"""Scenarios from tables: equal rows in every format, stable ids, and one error line for each invalid form.

The tests write every format with its usual library, so they read realistic files.
"""

import csv
import json
import os
import random
import sqlite3
import struct
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from art_cli.config.compose import load_config
from art_cli.config.sections.rollout_config import ScenariosConfig
from art_cli.loop.references import check_ready
from art_cli.rollouts.scenario_files import is_held_out, load_scenarios
from art_cli.runtime.errors import ConfigError, DataError

Json = dict[str, Any]

ROWS = [
    {"task": "t-1", "prompt": "2 + 2", "solution": "4"},
    {"task": "t-2", "prompt": 'say "ja",\nthen stop', "solution": "ja"},
    {"task": "t-3", "prompt": "été €", "solution": ""},
]
COLUMNS = {"id": "task", "question": "prompt", "answer": "solution"}
WANTED = [{"id": row["task"], "question": row["prompt"], "answer": row["solution"]} for row in ROWS]


# --- each format, as its library writes it ----------------------------------------------------------------------------


def write_csv(path: Path, rows: list[Json], *, delimiter: str = ",", encoding: str = "utf-8") -> None:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: list[Json]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[Json]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


def write_dataset(path: Path, rows: list[Json]) -> None:
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(str(path))


def write_sqlite(path: Path, rows: list[Json]) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE tasks (task, prompt, solution, due)")
    database.executemany("INSERT INTO tasks VALUES (:task, :prompt, :solution, 1)", rows)
    database.commit()
    database.close()


def write_duckdb(path: Path, rows: list[Json]) -> None:
    database = pytest.importorskip("duckdb").connect(str(path))
    database.execute("CREATE TABLE tasks (task VARCHAR, prompt VARCHAR, solution VARCHAR, due DATE)")
    database.executemany("INSERT INTO tasks VALUES ($task, $prompt, $solution, NULL)", rows)
    database.close()


QUERY = "SELECT * FROM tasks ORDER BY task"
FORMATS: dict[str, tuple[str, Callable[[Path, list[Json]], None], Json]] = {
    "csv": ("t.csv", write_csv, {}),
    "csv of a spreadsheet": ("t.csv", lambda p, r: write_csv(p, r, delimiter=";", encoding="utf-8-sig"), {}),
    "tsv": ("t.tsv", lambda p, r: write_csv(p, r, delimiter="\t"), {}),
    "json lines": ("t.jsonl", write_jsonl, {}),
    "parquet": ("t.parquet", write_parquet, {}),
    "dataset": ("saved", write_dataset, {}),
    "sqlite": ("t.db", write_sqlite, {"query": QUERY}),
    "duckdb": ("t.duckdb", write_duckdb, {"query": QUERY}),
}


def load(directory: Path, source: str, **settings: Any) -> list[Json]:
    return load_scenarios(ScenariosConfig(source=source, **settings), directory)


def refused(directory: Path, source: str, **settings: Any) -> str:
    """The line that says why a source is refused."""
    with pytest.raises(DataError) as caught:
        load(directory, source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_scenarios(tmp_path: Path, name: str) -> None:
    file, write, settings = FORMATS[name]
    write(tmp_path / file, ROWS)
    assert load(tmp_path, file, columns=COLUMNS, **settings) == WANTED
    if not settings and name != "json lines":  # a path alone takes every column
        derived = load_scenarios(file, tmp_path)
        assert [{key: row[key] for key in row if key != "id"} for row in derived] == ROWS


def test_a_split_of_a_dataset_with_several(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert load(tmp_path, "saved", split="test", columns=COLUMNS) == WANTED[:1]
    assert "which split? There are: train, test" in refused(tmp_path, "saved")
    assert "no split 'tets'. There are: train, test" in refused(tmp_path, "saved", split="tets")


def test_a_dataset_of_the_hub_comes_from_the_cache_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the form that `datasets` gives it: NAMESPACE___NAME/SUBSET/VERSION/COMMIT."""
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub.constants")
    write_parquet(tmp_path / "t.parquet", ROWS)
    commit = "0123456789abcdef0123456789abcdef01234567"
    built = datasets.load_dataset_builder("parquet", data_files=str(tmp_path / "t.parquet"), cache_dir=str(tmp_path))
    built.download_and_prepare(str(cached := tmp_path / "cache/acme___puzzles/default/0.0.0" / commit))
    (cached / "parquet-train.arrow").rename(cached / "puzzles-train.arrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert load(tmp_path, "acme/puzzles", split="train", columns=COLUMNS) == WANTED
    assert load(tmp_path, "acme/puzzles", split="train[1:]", revision=commit, columns=COLUMNS) == WANTED[1:]
    assert "another revision" in refused(tmp_path, "acme/puzzles", split="train", revision="f" * 40)
    assert "without network" in refused(tmp_path, "acme/other", split="train")
    assert "cannot be loaded from the hub: " in refused(tmp_path, "acme/puzzles", split="tset")


# --- ids --------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=2, max_size=8, unique=True), st.randoms())
def test_a_derived_id_depends_on_its_row_alone(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], order: random.Random
) -> None:
    """Property: reordering, more rows, and other formats change neither the id nor the split of a row."""
    directory = tmp_path_factory.mktemp("ids")
    rows = [{"prompt": prompt, "note": str(number)} for number, prompt in enumerate(prompts)]
    moved = order.sample(rows[1:], len(rows) - 1)
    write_csv(directory / "a.csv", rows)
    write_jsonl(directory / "b.jsonl", moved)
    whole, part = (load(directory, name, columns={"question": "prompt"}) for name in ("a.csv", "b.jsonl"))
    ids = {row["question"]: row["id"] for row in whole}
    assert len(set(ids.values())) == len(prompts)
    assert all(ids[row["question"]] == row["id"] for row in part)
    assert [is_held_out(row["id"], 0.5) for row in part] == [is_held_out(ids[row["question"]], 0.5) for row in part]


def test_derived_ids_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """sha256 of the JSON with sorted keys, 16 digits; a run that resumes finds its scenarios by them."""
    (tmp_path / "t.csv").write_text("question,answer\n2+2,4\n")
    assert [row["id"] for row in load_scenarios("t.csv", tmp_path)] == ["8bbbe307ef6926ee"]


def test_rows_that_are_equal_count_once_so_that_none_is_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_text("q\na\nb\na\na\n")
    assert [row["q"] for row in load_scenarios("t.csv", tmp_path)] == ["a", "b"]
    assert "skipped 2 duplicate rows" in caplog.text


# --- wrong shapes -----------------------------------------------------------------------------------------------------

WRONG_CSV = {
    "empty": (b"", "t.csv: the file is empty"),
    "a header alone": (b"q,a\n", "no scenarios"),
    "a longer row": (b"q,a\n1,2\n1,2,3\n", "t.csv:3: 3 cells, and the header has 2"),
    "a shorter row": (b"q,a\n1\n", "t.csv:2: 1 cells, and the header has 2"),
    "a row after one of two lines": (b'q,a\n"1\n2",2\n1\n', "t.csv:4: 1 cells"),
    "an open quote": (b'q,a\n"1,2\n', "t.csv:2: not CSV: unexpected end of data; is a quote left open?"),
    "no column": (b"promt,solution\n1,2\n", "no column 'prompt'; did you mean 'promt'? There are: promt, solution"),
    "latin 1": ("prompt,a\nété,1\n".encode("latin-1"), "the text is not UTF-8; save it as UTF-8"),
    "latin 1 in a later line": (
        "prompt,a\na,1\nb,2\né,3\n".encode("latin-1"),
        "t.csv:4: the text is not UTF-8; save it as UTF-8",
    ),
    "UTF-16": ("prompt,a\n1,2\n".encode("utf-16"), "the text is UTF-16; save it as UTF-8"),
    "an id twice": (b"prompt,id\n1,x\n2,x\n", "t.csv:3: the id 'x' is there already, at "),
    "an empty id": (b"prompt,id\n1,\n", "t.csv:2: \"id\" is a string or a whole number, not ''"),
    "a name twice": (b"prompt,prompt\n1,2\n", "two columns are called 'prompt'"),
    "a nameless column": (b",prompt\n0,2\n", "column 1 has no name (pandas writes its index so)"),
    "a huge cell": (b"prompt\n" + b"x" * 2**21, "more than 1 Mi characters"),
    "a huge cell of many lines": (b'prompt\n"' + b"x\n" * 2**20, "field larger than field limit"),
    "nothing but NUL": (b"\0" * 100, "no column"),
}


@pytest.mark.parametrize("name", WRONG_CSV)
def test_a_wrong_csv_is_one_line_with_its_place(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cli.rollouts.tables.csv_file.MAX_CELL", 2**20)
    data, message = WRONG_CSV[name]
    (tmp_path / "t.csv").write_bytes(data)
    columns = {} if "q" in data.decode("latin-1").partition("\n")[0] or "name" in name else {"question": "prompt"}
    columns |= {"id": "id"} if " id" in name else {}
    assert message in refused(tmp_path, "t.csv", columns=columns)
    assert csv.field_size_limit() == 131072  # Python's, as it was before


def test_what_parquet_holds_and_json_does_not(tmp_path: Path) -> None:
    row = {"q": "a", "due": date(2026, 1, 1), "raw": b"\xff", "x": float("nan"), "deep": [{"n": 1}], "n": 2**40}
    write_parquet(tmp_path / "t.parquet", [row])
    for column, message in {"due": "of type date32", "raw": "of type binary", "x": "holds NaN"}.items():
        assert message in refused(tmp_path, "t.parquet", columns={"v": column})
    assert "no column 'qq'" in refused(tmp_path, "t.parquet", columns={"v": "qq"})
    kept = load(tmp_path, "t.parquet", columns={"id": "q", "deep": "deep", "n": "n"})
    assert kept == [{"id": "a", "deep": [{"n": 1}], "n": 2**40}]


def test_a_damaged_parquet_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", [{"q": f"{n} " * 50} for n in range(300)])
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[: len(data) // 2])
    assert "no Parquet file" in refused(tmp_path, "t.parquet")
    for place in range(8, len(data) - 200, len(data) // 12):
        (tmp_path / "t.parquet").write_bytes(data[:place] + b"\xff" * 40 + data[place + 40 :])
        try:
            load(tmp_path, "t.parquet")
        except DataError as error:
            assert "\n" not in str(error)


def test_a_parquet_that_unpacks_to_more_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 cells of 256 KiB take less than 2 MiB in the file."""
    write_parquet(tmp_path / "t.parquet", [{"id": n, "q": "x" * 2**18} for n in range(60)])
    assert (tmp_path / "t.parquet").stat().st_size < 2 * 2**20
    monkeypatch.setattr("art_cli.rollouts.tables.columns.MAX_BYTES", 5 * 2**20)
    assert "larger than" in refused(tmp_path, "t.parquet")


SQL = {
    "DELETE FROM tasks": "not one SELECT",
    "SELECT 1; SELECT 2": "not one SELECT",
    "SELECT 1; DROP TABLE tasks": "not one SELECT",
    "INSERT INTO tasks VALUES (1, 2, 3, 4)": "not one SELECT",
    "PRAGMA writable_schema = ON": "",
    "ATTACH 'other.db' AS o": "not one SELECT",
    "VACUUM INTO 'copy.db'": "",
    "": "",
    "SELECT * FROM taks": "taks",
    "SELECT nothing FROM tasks": "nothing",
    "SELEC 1": "",
    "SELECT task AS a, task AS a FROM tasks": "two columns are called 'a'",
    "SELECT * FROM tasks WHERE false": "no scenarios",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
@pytest.mark.parametrize("query", SQL)
def test_a_query_that_is_no_select_is_not_run(
    tmp_path: Path, kind: str, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write, _ = FORMATS[kind]
    write(tmp_path / file, ROWS)
    before, names = (tmp_path / file).read_bytes(), sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert SQL[query] in refused(tmp_path, file, query=query)
    assert (tmp_path / file).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(
    "query",
    [
        "COPY tasks TO 'out.csv'",
        "SELECT * FROM read_csv('secret.csv')",
        "SELECT * FROM 'secret.csv'",
        "SELECT * FROM read_text('secret.csv')",
        "SELECT * FROM sqlite_scan('x.db', 't')",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELECT getenv('HOME')",
    ],
)
def test_duckdb_reads_no_other_file(tmp_path: Path, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_duckdb(tmp_path / "t.duckdb", ROWS)
    (tmp_path / "secret.csv").write_text("secret\n1\n")
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, "t.duckdb", query=query)
    assert sorted(os.listdir(tmp_path)) == ["secret.csv", "t.duckdb"]


def test_a_query_that_never_ends_is_broken_off(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "t.db", ROWS)
    write_duckdb(tmp_path / "t.duckdb", ROWS)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    product = "SELECT sum(hash(a.i) % 7 * (b.i % 3)) AS s FROM range(10000000) a(i), range(10000000) b(i)"
    assert "took longer than 0.2 s" in refused(tmp_path, "t.db", query=endless, timeout_s=0.2)
    assert "took longer than 0.2 s" in refused(tmp_path, "t.duckdb", query=product, timeout_s=0.2)


def test_what_sqlite_holds_and_json_does_not(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "t.db", ROWS)
    assert "holds a bytes, which JSON has not" in refused(tmp_path, "t.db", query="SELECT x'ff' AS v")
    assert "holds inf, which JSON has not" in refused(tmp_path, "t.db", query="SELECT 9e999 AS v")
    assert "UTF-8" in refused(tmp_path, "t.db", query="SELECT CAST(x'ff' AS TEXT) AS v")
    assert "too big" in refused(tmp_path, "t.db", query="SELECT zeroblob(900000000) AS v")
    assert "(timeout_s)" not in refused(tmp_path, "t.db", query="SELECT load_extension('x')")


def test_what_duckdb_holds_and_json_does_not(tmp_path: Path) -> None:
    write_duckdb(tmp_path / "t.duckdb", ROWS)
    for value, what in {
        "DATE '2026-01-01'": "a date",
        "1.5::DECIMAL(4, 2)": "a Decimal",
        "'x'::BLOB": "a bytes",
        "170141183460469231731687303715884105727::HUGEINT": "more than 64 bits",
        "'nan'::DOUBLE": "NaN",
        "MAP {1: 2}": "a map whose keys are not text",
    }.items():
        assert what in refused(tmp_path, "t.duckdb", query=f"SELECT {value} AS v")
    nested = load(tmp_path, "t.duckdb", query="SELECT 'a' AS id, [{'n': 1.5::DOUBLE}] AS v")
    assert nested == [{"id": "a", "v": [{"n": 1.5}]}]


def test_a_full_text_index_is_read(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "t.db")
    database.execute("CREATE VIRTUAL TABLE mails USING fts5(body)")
    database.executemany("INSERT INTO mails VALUES (?)", [("the invoice is late",), ("lunch",)])
    database.commit()
    database.close()
    query = "SELECT rowid AS id, body FROM mails WHERE mails MATCH 'invoice' ORDER BY bm25(mails)"
    assert load(tmp_path, "t.db", query=query) == [{"id": 1, "body": "the invoice is late"}]
    assert "not one SELECT" in refused(tmp_path, "t.db", query="UPDATE sqlite_master SET sql = ''")
    assert "not one SELECT" in refused(tmp_path, "t.db", query="DELETE FROM mails")


def test_a_sqlite_file_in_wal_mode_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Nor is what another program has written to its log overlooked."""
    database = sqlite3.connect(tmp_path / "t.db")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE tasks (id)")
    database.execute("INSERT INTO tasks VALUES ('new')")
    database.commit()
    assert load(tmp_path, "t.db", query="SELECT id FROM tasks") == [{"id": "new"}]
    database.close()
    assert load(tmp_path, "t.db", query="SELECT id FROM tasks") == [{"id": "new"}]
    assert os.listdir(tmp_path) == ["t.db"]


def test_the_wrong_kind_of_source_is_named(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "t.db", ROWS)
    write_csv(tmp_path / "t.csv", ROWS)
    (tmp_path / "plain").mkdir()
    assert "a sqlite file; add what to read from it" in refused(tmp_path, "t.db")
    assert "no SQLite or DuckDB file" in refused(tmp_path, "t.csv", query="SELECT 1")
    assert "no such file" in refused(tmp_path, "no.db", query="SELECT 1")
    assert "one file has no splits" in refused(tmp_path, "t.csv", split="train")
    assert "not a saved dataset" in refused(tmp_path, "plain")
    assert "a dataset of the hub needs `split`" in refused(tmp_path, "acme/puzzles")


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    for file, write in (("t.db", write_sqlite), ("t.duckdb", write_duckdb)):
        write(tmp_path / file, ROWS)
        data = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(data[:100] + b"\xff" * (len(data) - 100))
        refused(tmp_path, file, query="SELECT * FROM tasks")


def test_a_dataset_never_brings_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged directory, and one with a script in it, are refused; the script does not run."""
    write_dataset(tmp_path / "saved", ROWS)
    (tmp_path / "saved/saved.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    assert len(load(tmp_path, "saved")) == 3
    for file in (tmp_path / "saved").glob("*.arrow"):
        file.write_bytes(b"\x80\x04" + zlib.compress(struct.pack("<100I", *range(100))))
    assert "no dataset: " in refused(tmp_path, "saved")
    (tmp_path / "saved/state.json").write_text("[]")
    assert "no dataset: " in refused(tmp_path, "saved")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query": "SELECT 1", "split": "train"}, "leave one of them out"),
        ({"subset": "main"}, "needs 'split' too"),
        ({"timeout_s": 3}, "the time for a 'query'"),
        ({"columsn": {}}, "Extra inputs"),
    ],
)
def test_settings_of_another_kind_are_refused_at_load(settings: Json, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScenariosConfig(source="x", **settings)


def test_a_source_alone_is_recorded_as_it_was_written() -> None:
    """So a run that began before sources had settings goes on."""
    assert ScenariosConfig(source="a.jsonl").model_dump(mode="json") == "a.jsonl"
    assert ScenariosConfig(source="a.csv", columns={"q": "p"}).model_dump(mode="json")["columns"] == {"q": "p"}


@pytest.mark.slow
def test_a_command_line_adds_to_a_source_that_stands_alone(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ROWS)
    (tmp_path / "rollout.py").write_text("def rollout(policy, scenario): return 1.0\n")
    (tmp_path / "c.yaml").write_text(
        "model: {base: 'builtin:tiny'}\nrollout: {entry: 'rollout.py:rollout', scenarios: t.csv}\n"
        "judge: rollout\neval: {scenarios: {source: t.csv, columns: {id: task}}}\n"
    )
    loaded = load_config(tmp_path / "c.yaml", ["rollout.scenarios.columns.q=prompt", "eval.scenarios=t.csv"])
    assert loaded.config.rollout.scenarios == ScenariosConfig(source="t.csv", columns={"q": "prompt"})
    assert loaded.config.eval is not None and loaded.config.eval.scenarios == ScenariosConfig(source="t.csv")
    check_ready(loaded, ("rollout", "eval"))
    for wrong, message in {
        "rollout.scenarios.source=s.csv": "s.csv: no such file; did you mean 't.csv'?",
        "rollout.scenarios={source: acme/puzzles, subset: main}": "needs 'split' too",
        "rollout.scenarios.colums=1": "did you mean",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_ready(load_config(tmp_path / "c.yaml", [wrong]), ("rollout", "eval"))
        assert message in str(caught.value) and "rollout.scenarios" in str(caught.value)
