"""Lists, histograms and trees of groups, against what the records themselves say."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import Json
from art_cli.view.group_rows import Query, build_tree, find_groups, histogram
from art_cli.view.index import Index, IndexedStep
from tests.support.records.attempts import attempt, scored

REWARDS = st.lists(st.floats(-MAX_NUMBER, MAX_NUMBER) | st.sampled_from([0.0, 0.5, 1.0]), max_size=60)


def step_of(path: Path, records: list[object]) -> IndexedStep:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    index = Index(path)
    index.look()
    [step] = index.steps()
    assert step.advance(60)
    return step


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@given(rewards=REWARDS)
def test_each_bin_as_a_filter_finds_its_own_attempts(place: Path, rewards: list[float]) -> None:
    step = step_of(place / "a.jsonl", [scored(f"g{n}", 0, reward=reward) for n, reward in enumerate(rewards)])
    found = histogram(step)
    for each in found.bins:
        assert find_groups(step, Query(min=each.low, max=each.high)).total == each.count
    assert sum(each.count for each in found.bins) == len(rewards)
    assert found.missing == 0


@given(sources=st.lists(st.sampled_from([None, "desk", "echo", "a\u202eb"]), max_size=8))
def test_groups_are_found_by_their_source(place: Path, sources: list[str | None]) -> None:
    """A name that cannot be seen is found as it is shown."""
    records = [scored(f"g{n}", 0, reward=1.0, source=source) for n, source in enumerate(sources)]
    step, shown = step_of(place / "s.jsonl", records), {"desk": "desk", "echo": "echo", "a\u202eb": "a\\u202eb"}
    assert step.numbers().sources == sorted({shown[name] for name in sources if name})
    for name, known in shown.items():
        rows = find_groups(step, Query(source=known)).rows
        assert [row.group_id for row in rows] == [f"g{n}" for n, source in enumerate(sources) if source == name]
        assert {row.source for row in rows} <= {known}
    assert find_groups(step, Query()).total == len(sources)


@given(rewards=st.lists(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=4), max_size=8))
def test_groups_are_sorted_as_their_numbers_are(place: Path, rewards: list[list[float | None]]) -> None:
    records = [
        scored(f"g{n}", index, reward=reward, group_size=len(group), error="timeout: x" if reward is None else None)  # type: ignore[arg-type]
        for n, group in enumerate(rewards)
        for index, reward in enumerate(group)
    ]
    step = step_of(place / "b.jsonl", records)
    means: dict[str, float] = {}
    for n, group in enumerate(rewards):
        if known := [reward for reward in group if reward is not None]:
            means[f"g{n}"] = sum(known) / len(known)
    for is_descending in (False, True):
        rows = find_groups(step, Query(sort="reward", is_descending=is_descending)).rows
        shown = [row.group_id for row in rows]
        assert shown[: len(means)] == sorted(means, key=lambda g: means[g], reverse=is_descending)
        assert sorted(shown) == sorted(f"g{n}" for n in range(len(rewards)))
    rows = find_groups(step, Query(sort="errors", is_descending=True)).rows
    assert [row.num_errors for row in rows] == sorted((group.count(None) for group in rewards), reverse=True)
    for row in find_groups(step, Query(has_errors=True)).rows:
        assert row.error == "timeout"
    pages = [find_groups(step, Query(offset=at, limit=1)) for at in range(len(rewards))]
    assert [page.rows[0].group_id for page in pages] == [f"g{n}" for n in range(len(rewards))]
    for row, group in zip(find_groups(step, Query()).rows, rewards, strict=True):
        known = [reward for reward in group if reward is not None]
        spread = math.sqrt(sum((each - means[row.group_id]) ** 2 for each in known) / len(known)) if known else None
        assert row.rewards == group
        assert row.spread == pytest.approx(spread)


def test_text_is_found_in_what_was_said_and_nowhere_else(tmp_path: Path) -> None:
    said: list[Json] = [{"role": "user", "content": 'Ein "Käse"\nund <b>'}]
    step = step_of(
        tmp_path / "a.jsonl",
        [
            scored("words", 0, messages=said),
            scored("part", 0, messages=[{"role": "user", "content": [{"type": "text", "text": "a Part of it"}]}]),
            scored("error", 0, error="KeyError: 'order'", messages=[]),
            scored("key", 0, messages=[], metadata={"cheese": "elsewhere"}, scenario={"id": "x", "q": "scenario"}),
            {"id": "p", "group_id": "plain", "messages": [{"role": "user", "content": "plainly"}]},
        ],
    )

    def groups(text: str) -> list[str]:
        return [row.group_id for row in find_groups(step, Query(text=text)).rows]

    assert groups('"KÄSE"\nund') == groups("<B>") == ["words"]
    assert groups("a part of") == ["part"]
    assert groups("'order'") == ["error"]
    assert groups("PLAINLY") == ["plain"]
    assert groups("found at once") == ["words", "part", "error", "key"]  # the judge's words
    assert groups("elsewhere") == groups("group_id") == groups("scenario") == []


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.sampled_from("ab")}),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=1, max_size=4))
def test_paths_of_the_tree_spell_the_conversations(attempts: list[list[list[Json]]]) -> None:
    tree = build_tree([attempt(messages=each[-1], branches=each[:-1]) for each in attempts])
    by_id = {node.id: node for node in tree.nodes}
    children = [(node.parent, node.role, node.text) for node in tree.nodes]
    assert len(set(children)) == len(children)  # no message stands twice behind the same parent
    for place, conversations in enumerate(attempts):
        spelled = set()
        for node in tree.nodes:
            if place in node.attempts:
                path = [node]
                while (parent := path[0].parent) is not None:
                    path.insert(0, by_id[parent])
                spelled.add(tuple((each.role, each.text) for each in path))
        prefixes = {
            tuple((m["role"], m["content"]) for m in messages[: end + 1])
            for messages in conversations
            for end in range(len(messages))
        }
        assert spelled == prefixes
