"""Scenarios: read strictly, ordered as a pure function of ids, seed and step."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.rollouts.scenario_files import ScenarioOrder, load_scenarios
from art_cli.runtime.errors import DataError, UsageError

# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_its_objects_in_order(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "level": 2}\r\n\n{"id": 1}')
    assert load_scenarios("s.jsonl", tmp_path) == [{"id": "a", "level": 2}, {"id": 1}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a"}\n{"id": "b"\n', r"s\.jsonl:2: not a JSON object"),
        ('{"id": "a"}\n[1]\n', r"s\.jsonl:2: .*not \[1\]; write one object per line"),
        ('{"id": "a"},\r\n{"id": "b"}\n', r"s\.jsonl:1: .*without commas between lines"),
        ('{"id": "a"}\n\n{"level": 1}\n', r's\.jsonl:3: .*no "id"'),
        ('{"id": null}\n', r"s\.jsonl:1: .*not None"),
        ('{"id": true}\n', r"s\.jsonl:1: .*not True"),
        ('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n', r"s\.jsonl:3: the id 'a' is there already, in line 1"),
        ('{"id": "1"}\n{"id": 1}\n', r"s\.jsonl:2: the id 1 is there already, in line 1"),
        ('{"id": "a"}\n{"id": "b", "answer": NaN}\n', r"s\.jsonl:2: .*NaN is not a number in JSON"),
        ('{"id": "a", "metrics": {"x": -Infinity}}\n', r"s\.jsonl:1: .*-Infinity is not a number in JSON"),
        ('{"answer": 1e999}\n', r"s\.jsonl:1: .*1e999 is not a number in JSON"),
        ('{"id": "a", "x": ' + "[" * 900 + "]" * 900 + "}\n", r"s\.jsonl:1: nested deeper than 64 levels"),
        ('{"x": ' + "[" * 900 + "]" * 900 + "}\n", r"s\.jsonl:1: nested deeper than 64 levels"),
        ("\n\n", r"s\.jsonl: no scenarios"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.jsonl").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_scenarios("s.jsonl", tmp_path)
    assert "\n" not in str(caught.value)


def test_lines_and_items_without_any_id_get_hashes_of_their_content_whatever_their_order(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2", "answer": 4}, {"prompt": "3+3", "answer": [6]}, {"prompt": "2+2", "answer": 4}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "back.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    (tmp_path / "make.py").write_text(f"made = {rows}\n")
    found = load_scenarios("s.jsonl", tmp_path)
    assert [{key: value for key, value in each.items() if key != "id"} for each in found] == rows[:2]
    assert load_scenarios("make.py:made", tmp_path) == found
    assert sorted(each["id"] for each in load_scenarios("back.jsonl", tmp_path)) == sorted(each["id"] for each in found)


def test_a_missing_file_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; scenarios come from a file"):
        load_scenarios("s.jsonl", tmp_path)


def test_a_python_iterable_works_as_function_or_as_it_is(tmp_path: Path) -> None:
    source = "def make():\n    for n in range(3):\n        yield {'id': f's{n}', 'n': n}\nlisted = [{'id': 'x'}]\n"
    (tmp_path / "make.py").write_text(source)
    assert [s["n"] for s in load_scenarios("make.py:make", tmp_path)] == [0, 1, 2]
    assert load_scenarios("make.py:listed", tmp_path) == [{"id": "x"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def make(): return 5", "expected an iterable of objects with an id, not int"),
        ("def make(): return 'abc'", "not str"),
        ("async def make(): return []", "not coroutine"),
        ("def make(): return [{'id': 'a'}, {'id': 'a'}]", "item 2: the id 'a' is there already"),
        ("def make(): return [{'id': 'a', 'f': make}]", "item 1: a scenario is plain JSON data"),
        ("def make(): return []", "no scenarios"),
        ("def make(): raise KeyError('x')", "it raised KeyError"),
        ("import itertools\ndef make(): return ({'id': n} for n in itertools.count())", "does the iterable end"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'make' was never awaited:RuntimeWarning")
def test_a_bad_iterable_is_a_data_error(
    tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_cli.rollouts.scenario_files.MAX_SCENARIOS", 100)
    (tmp_path / "make.py").write_text(source)
    with pytest.raises(DataError, match=message):
        load_scenarios("make.py:make", tmp_path)


def test_a_function_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text("def make(): return []")
    with pytest.raises(UsageError, match="did you mean 'make'"):
        load_scenarios("make.py:mkae", tmp_path)


# --- order ------------------------------------------------------------------------------------------------------------

ids_strategy = st.lists(st.text(max_size=3), min_size=1, max_size=9, unique=True)


@given(ids_strategy, st.integers(0, 3), st.integers(1, 20), st.booleans())
def test_every_epoch_plays_each_scenario_once(ids: list[str], seed: int, per_step: int, shuffle: bool) -> None:
    """Property: concatenated steps consist of blocks of len(ids) positions, and each block is a permutation."""
    order = ScenarioOrder(ids, seed=seed, shuffle=shuffle)
    places = [place for step in range(4 * len(ids)) for place in order.groups(step, per_step)]
    for start in range(0, len(places) - len(ids) + 1, len(ids)):
        assert sorted(places[start : start + len(ids)]) == list(range(len(ids)))
    if not shuffle:
        assert places == [n % len(ids) for n in range(len(places))]


@given(ids_strategy, st.integers(0, 3), st.integers(0, 50), st.integers(1, 20), st.randoms())
def test_a_step_is_a_pure_function_of_scenarios_seed_and_step(
    ids: list[str], seed: int, step: int, per_step: int, random: Random
) -> None:
    """Property: for every order of calls and of the file, step N plays the same scenarios."""
    played = [ids[place] for place in ScenarioOrder(ids, seed=seed).groups(step, per_step)]
    resumed = ScenarioOrder(ids, seed=seed)
    for earlier in range(step):
        resumed.groups(earlier, per_step)
    assert [ids[place] for place in resumed.groups(step, per_step)] == played
    moved = random.sample(ids, len(ids))
    assert [moved[place] for place in ScenarioOrder(moved, seed=seed).groups(step, per_step)] == played


def test_epochs_and_seeds_differ_and_no_place_is_preferred() -> None:
    """300 epochs of 6: each scenario is first 50 times on average, standard deviation sqrt(300 * 5 / 36) = 6.5."""
    order = ScenarioOrder(list("abcdef"), seed=0)
    epochs = [tuple(order.groups(step, 6)) for step in range(300)]
    assert len(set(epochs)) > 200
    first = Counter(epoch[0] for epoch in epochs)
    assert all(abs(first[place] - 50) < 5 * 6.5 for place in range(6))
    assert epochs[0] != tuple(ScenarioOrder(list("abcdef"), seed=1).groups(0, 6))
