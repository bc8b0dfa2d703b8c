"""What `art judge` makes of files that are not what they should be: another input's, judge's or program's.

The judges here cost nothing: the rollout's own reward, or a function.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.config.schema import BlendJudgeConfig, FunctionJudgeConfig, RewardModelJudgeConfig, RulerJudgeConfig
from art_cli.formats.openai_log import record_of
from art_cli.judges import make_judge
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.learners.sft.examples import load_demos, without_source
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.durable import LineWriter, read_lines, write_lines
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, score_trajectory
from art_cli.runtime.errors import DataError, RunError
from tests.support.attacks.hostile import assert_in_words
from tests.support.judges.ruler_cases import rated
from tests.support.paths import ROOT
from tests.support.processes.waiting import wait_until

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judge(art: Art, file: str, *arguments: str) -> tuple[int, str, str]:
    return art("judge", file, "judge=rollout", *arguments)


def rewards(path: str) -> dict[str, float | None]:
    return {trajectory.id: trajectory.reward for trajectory in read_lines(Path(path), ScoredTrajectory)}


def write(path: str, *rewards: float, text: str = "hi", group: str = "g") -> Sequence[Trajectory]:
    """One group of ours with these returned rewards."""
    rows = rated(list(rewards), group=group)
    for row, reward in zip(rows, rewards, strict=True):
        row.returned_reward = reward
        row.messages = [*row.messages, {"role": "user", "content": text}]
    write_lines(Path(path), rows)
    return rows


def art_group(*rewards: float, text: str = "hi") -> Json:
    """A group as OpenPipe ART writes it, on one line."""
    message = {"role": "user", "content": text}
    return {"trajectories": [{"messages_and_choices": [message], "reward": reward} for reward in rewards]}


# --- 3: whose output it is --------------------------------------------------------------------------------------------


def test_two_files_in_one_directory_are_scored_to_two_files(art: Art) -> None:
    """ART's groups have no names but their line's number: both files hold a group "line-1"."""
    for name, reward in (("a", 0.25), ("b", 0.75)):
        Path(f"{name}.jsonl").write_text(json.dumps(art_group(reward, 1.0)) + "\n")
        code, out, err = judge(art, f"{name}.jsonl")
        assert code == 0, err
        assert out.startswith(f"{name}.scored.jsonl: 1 group scored, ")
    assert rewards("a.scored.jsonl") == {"line-1/0": 0.25, "line-1/1": 1.0}
    assert rewards("b.scored.jsonl") == {"line-1/0": 0.75, "line-1/1": 1.0}


@pytest.mark.slow
def test_another_inputs_output_is_refused_whatever_its_groups_are_called(art: Art) -> None:
    Path("a.jsonl").write_text(json.dumps(art_group(0.25, 1.0)) + "\n")
    Path("b.jsonl").write_text(json.dumps(art_group(0.25, 1.0, text="other words")) + "\n")
    assert judge(art, "a.jsonl", "-o", "s.jsonl")[0] == 0
    before = Path("s.jsonl").read_bytes()
    code, _, err = judge(art, "b.jsonl", "-o", "s.jsonl")
    assert code == 1
    assert "s.jsonl:1: trajectory 'line-1/0' differs from the attempt with the same id in b.jsonl" in err
    assert "-o" in err and "--fresh" in err
    assert Path("s.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("turns", []),
        ("returned_reward", 0.5),
        ("metadata", {"a": 2}),
        ("error", "timeout: 3 s"),
        ("step", 7),
    ],
)
def test_a_new_attempt_under_an_old_id_is_not_taken_for_scored(art: Art, field: str, value: Any) -> None:
    rows = write("t.jsonl", 0.25, 1.0)
    rows[1].metadata = {"a": 1}
    rows[1].turns = [TURN]
    write_lines(Path("t.jsonl"), rows)
    assert judge(art, "t.jsonl")[0] == 0
    setattr(rows[1], field, value)
    write_lines(Path("t.jsonl"), rows)
    code, _, err = judge(art, "t.jsonl")
    assert code == 1 and "t.scored.jsonl:2: trajectory 'g-1' differs from the attempt with the same id in" in err
    code, out, _ = judge(art, "t.jsonl", "--fresh")
    assert code == (1 if field == "returned_reward" and value is None else 0), out


def test_attempts_of_other_ids_are_not_taken_for_scored(art: Art) -> None:
    rows = write("t.jsonl", 0.25, 1.0)
    assert judge(art, "t.jsonl")[0] == 0
    rows[0].id = "g-new"
    write_lines(Path("t.jsonl"), rows)
    code, _, err = judge(art, "t.jsonl")
    assert code == 1 and "t.scored.jsonl:1: trajectory 'g-0' is not in t.jsonl" in err


def test_a_copy_of_the_unscored_input_is_not_a_scored_file(art: Art) -> None:
    write("t.jsonl", 0.25, 1.0)
    Path("copy.jsonl").write_bytes(Path("t.jsonl").read_bytes())
    code, _, err = judge(art, "t.jsonl", "-o", "copy.jsonl")
    assert code == 1 and "copy.jsonl:1: not scored: neither a reward nor an error" in err
    assert Path("copy.jsonl").read_bytes() == Path("t.jsonl").read_bytes()


def test_a_link_to_the_input_is_the_input(art: Art) -> None:
    write("t.jsonl", 0.25, 1.0)
    os.link("t.jsonl", "linked.jsonl")
    code, _, err = judge(art, "t.jsonl", "-o", "linked.jsonl", "--fresh")
    assert code == 2 and "input and output are the same file" in err
    assert Path("t.jsonl").stat().st_size > 0


def test_a_file_of_something_else_named_as_output_stays_as_it_is(art: Art) -> None:
    """Its last line has no newline, as a torn one; but no record of ours begins like that."""
    write("t.jsonl", 0.25, 1.0)
    Path("notes.txt").write_text("Do not lose these notes")
    code, _, err = judge(art, "t.jsonl", "-o", "notes.txt")
    assert code == 1 and "notes.txt: its last line is not a record" in err
    assert Path("notes.txt").read_text() == "Do not lose these notes"


# --- 4: whose judge it is ---------------------------------------------------------------------------------------------

FUNCTION = "def judge(group):\n    return [{} for _ in group]\n"


def blend(**weights: float) -> str:
    """A configuration whose judge is a blend of the functions of these names."""
    named = {name: {"name": "function", "entry": f"{name}.py:judge"} for name in weights if name != "rollout"}
    judge = {"name": "blend", "blend": weights, "judges": named}
    config = Path("-".join(f"{name}{weight}" for name, weight in weights.items()) + ".yaml")
    config.write_text(
        json.dumps({"model": {"base": "b"}, "rollout": {"entry": "r:r", "scenarios": "s"}, "judge": judge})
    )
    return f"--config={config}"


@pytest.mark.slow
def test_scores_of_two_judges_are_not_mixed_in_one_file(art: Art) -> None:
    """Each judge, then a different judge, on a half-scored file; only the same judge resumes.

    Judges are told apart by the digest of their settings; all digests differ.
    """
    for name, number in (("one", 1), ("two", 2)):
        Path(f"{name}.py").write_text(FUNCTION.format(number))
    judges = [
        ["judge=rollout"],
        ["judge=function", "judge.entry=one.py:judge"],
        ["judge=function", "judge.entry=two.py:judge"],
        [blend(one=1, rollout=3)],
        [blend(one=3, rollout=1)],
        [blend(two=1, rollout=3)],
    ]
    first, second = write("first.jsonl", 0.25, 1.0), write("second.jsonl", 0.5, 0.75, group="h")
    digests = set()
    for mine, following in zip(judges, [*judges[1:], judges[0]], strict=True):
        write_lines(Path("t.jsonl"), first)
        assert art("judge", "t.jsonl", *mine, "--fresh")[0] == 0
        write_lines(Path("t.jsonl"), [*first, *second])
        before = Path("t.scored.jsonl").read_bytes()
        digests |= {row.judge_settings for row in read_lines(Path("t.scored.jsonl"), ScoredTrajectory)}
        for other in (mine, following):
            Path("t.scored.jsonl").write_bytes(before)
            code, out, err = art("judge", "t.jsonl", *other)
            if mine is other:
                assert code == 0 and "1 group scored (1 were before)" in out
            else:
                assert code == 1 and "t.scored.jsonl:1: judged with other settings" in err, (mine, other, err)
                assert Path("t.scored.jsonl").read_bytes() == before
    assert len(digests) == len(judges)


def test_a_digest_changes_with_all_that_decides_a_reward_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTION.format(1))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")

    def function(**fields: Any) -> str:
        return made(FunctionJudgeConfig(name="function", **{"entry": "f.py:judge", **fields}))

    def model(**fields: Any) -> str:
        return made(RewardModelJudgeConfig(name="reward_model", **{"model": "model", **fields}))

    def made(config: Any) -> str:
        return make_judge(config, tmp_path).settings

    assert function() == function(timeout_s=3) == function()
    assert model() == model(batch_size=3, device="cpu") != model(label=1) != model(activation="sigmoid")
    assert model(max_length=7) != model() != model(model="other/model")
    before = function(), model()
    (tmp_path / "f.py").write_text(FUNCTION.format(2))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0] }}")
    assert function() != before[0] and model() != before[1]
    ruler = RulerJudgeConfig(name="ruler", api_base="http://127.0.0.1:9/v1", model="m", cache=None)
    blends = {
        made(BlendJudgeConfig(name="blend", blend=weights, judges={"ruler": judge} if "ruler" in weights else {}))
        for weights in ({"ruler": 1, "rollout": 2}, {"ruler": 2, "rollout": 1}, {"rollout": 1})
        for judge in (ruler, ruler.model_copy(update={"votes": 2}))
    }
    assert len(blends) == 2 + 2 + 1


def test_a_file_that_an_older_art_wrote_with_ruler_is_gone_on_with(tmp_path: Path) -> None:
    """Old RULER lines store the digest only in scores; old lines from other judges have no digest and are rejected."""
    from art_cli.judges.files.session import scored_groups
    from art_cli.runs.trajectory import Score, score_trajectory

    rows = write("t.jsonl", 0.25, 1.0)
    source = TrajectoryFile(Path("t.jsonl"))
    scores = [Score(judge="ruler", score=0.5, settings="abc")], [Score(judge="function", score=0.5)]
    for name, given in zip("rf", scores, strict=True):
        plain = [msgspec.to_builtins(score_trajectory(row, 0.5, given)) for row in rows]
        write_lines(tmp_path / name, [{key: row[key] for key in row if key != "judge_settings"} for row in plain])
    assert scored_groups(TrajectoryFile(tmp_path / "r"), source, "abc") == {"g"}
    for name, settings in (("r", "abd"), ("f", "abc")):
        with pytest.raises(RunError, match=f"{name}:1: judged with other settings"):
            scored_groups(TrajectoryFile(tmp_path / name), source, settings)


# --- 5: who holds it --------------------------------------------------------------------------------------------------

SLOW = """
import pathlib, time
def judge(group):
    pathlib.Path("begun").touch()
    deadline = time.monotonic() + 60
    while not pathlib.Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [0.5 for _ in group]
"""


@pytest.fixture
def slow_judge() -> subprocess.Popen[str]:
    """A separate `art judge t.jsonl` process, paused in the middle of a group until the file "go" exists."""
    write("t.jsonl", 0.25, 1.0)
    Path("slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "art_cli", "judge", "t.jsonl", "judge=function", "judge.entry=slow.py:judge"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(Path("begun").exists)
    return process


@pytest.mark.slow
def test_fresh_does_not_take_away_the_file_that_another_process_writes(
    art: Art, slow_judge: "subprocess.Popen[str]"
) -> None:
    inode = Path("t.scored.jsonl").stat().st_ino
    code, _, err = judge(art, "t.jsonl", "--fresh")
    assert code == 1 and "another process is writing it" in err
    assert Path("t.scored.jsonl").stat().st_ino == inode
    Path("go").touch()
    _, err = slow_judge.communicate(timeout=60)
    assert slow_judge.returncode == 0, err
    assert rewards("t.scored.jsonl") == {"g-0": 0.5, "g-1": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_who_wrote_to_a_file_that_is_gone_does_not_report_success(
    replaced: bool, slow_judge: "subprocess.Popen[str]"
) -> None:
    Path("t.scored.jsonl").unlink()
    if replaced:
        Path("t.scored.jsonl").write_text("")
    Path("go").touch()
    out, err = slow_judge.communicate(timeout=60)
    assert slow_judge.returncode == 1 and "t.scored.jsonl: was removed or replaced while it was written" in err, out


def test_every_writer_of_lines_holds_its_file_until_it_is_closed(tmp_path: Path) -> None:
    """Within one process and between two, always on the file currently under the name, never on a removed file."""
    path = tmp_path / "t.jsonl"
    with LineWriter(path) as writer:
        with pytest.raises(RunError, match="another process is writing it"):
            LineWriter(path)
        with pytest.raises(RunError, match="another process is writing it"):
            LineWriter(path, is_fresh=True)
        writer.append({"a": 1})
    path.unlink()
    with LineWriter(path) as writer:
        assert writer.is_in_place()
        path.unlink()
        assert not writer.is_in_place()
        with LineWriter(path) as second:
            second.append({"b": 1})
    assert path.read_bytes() == b'{"b":1}\n'


# --- 11 and 17: other people's lines ----------------------------------------------------------------------------------

TURN = msgspec.convert(
    {"parent": None, "kept": 0, "prompt_ids": [1], "sampled_ids": [2], "logprobs": [-0.5], "raw_logprobs": None}
    | {"step": 0, "temperature": 1.0},
    type=Trajectory.__annotations__["turns"].__args__[0],
)
GOOD = '{"messages": [{"role": "user", "content": "hi"}], "group_id": "good", "reward": 0.5}\n'


def plain(content: Any, **fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}], "group_id": "odd", "reward": 0.25, **fields})


def own(**fields: Any) -> str:
    known = {"id": "a", "group_id": "odd", "group_size": 1, "index": 0, "messages": [], "returned_reward": 0.25}
    return json.dumps(known | fields)


def twice(line: str) -> list[str]:
    """A group of two such attempts, as RULER compares them."""
    known = json.loads(line)
    if "index" not in known:
        return [line, line]
    return [json.dumps(known | {"id": name, "group_size": 2, "index": index}) for index, name in enumerate("ab")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        plain([{"type": ["text"], "text": "a"}]),
        plain([{"type": {"a": 1}}]),
        plain([{"type": "text", "text": {"a": 1}}]),
        plain([{"type": "image_url", "image_url": [1]}, {"type": "image_url", "image_url": {"url": 3}}, 3, None]),
        plain("a", tools=[{"function": 3}, {}]),
        plain("a", metrics={"loss": float("nan"), "high": float("inf"), "fine": 1}),
        plain("half a pair: \ud800", note="\udfff\ud800"),
        plain("a", note=10**300),
        own(metrics={"loss": float("nan")}, metadata={"a": float("-inf")}),
        own(messages=[{"role": ["user"], "content": {"a": "\ud83d"}, "tool_calls": {"a": 3}}]),
        own(messages=[{"role": "assistant", "tool_calls": [3, {"id": [1]}, {"function": {"name": {}}}]}]),
    ],
)
def test_a_line_with_something_odd_inside_is_judged(art: Art, line: str) -> None:
    """RULER renders the file (a dry run writes every prompt), a judge scores it, and the output can be read back."""
    Path("pairs.jsonl").write_text("".join(f"{each}\n" for each in (GOOD.strip(), GOOD.strip(), *twice(line))))
    ruler = ["judge.api_base=http://127.0.0.1:9/v1", "judge.cache=null"]
    code, out, err = art("judge", "pairs.jsonl", *ruler, "--dry-run")
    assert code == 0 and out.startswith("2 groups to judge: 2 calls"), err
    Path("t.jsonl").write_text(f"{GOOD}{line}\n")
    code, _, err = judge(art, "t.jsonl")
    assert code == 0, err
    assert sorted(rewards("t.scored.jsonl").values()) == [0.25, 0.5]
    code, out, err = judge(art, "t.jsonl", "--report")
    assert code == 0 and "0 groups scored (2 were before)" in out, err


def test_an_address_without_http_is_refused_before_any_call(art: Art) -> None:
    Path("t.jsonl").write_text(GOOD)
    code, _, err = art("judge", "t.jsonl", "judge={name: ruler, model: m, base_url: '127.0.0.1:9/v1'}")
    assert code == 2 and err.startswith("error: judge.base_url: '127.0.0.1:9/v1' is not an address; expected one such")


def test_a_file_of_failed_attempts_alone_is_no_success(art: Art) -> None:
    rows = rated([0.2, 0.8])
    for row in rows:
        row.error = "ValueError: it broke"
    write_lines(Path("t.jsonl"), rows)
    code, out, err = judge(art, "t.jsonl")
    assert code == 1 and "no reward; 2 of 2 attempts failed" in out and "every attempt failed" in err


def test_a_conversation_that_art_wrote_for_other_tools_is_judged_as_the_attempt_that_it_was(tmp_path: Path) -> None:
    """`art generate --format openai` writes such lines. A failed attempt stays one, and sub-agents are seen."""
    said = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    common = {"group_id": "g", "group_size": 3, "messages": said}
    written = [
        Trajectory(id="a", index=0, returned_reward=1.0, branches=[said[:1]], **common),
        Trajectory(id="b", index=1, error="ValueError: it broke", **common),
    ]
    lines = [*map(record_of, written), {"id": "c", "group_id": "g", "messages": said, "reward": True, "error": None}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = TrajectoryFile(tmp_path / "t.jsonl")
    [group] = source
    read = source.load(group)
    assert [each.error for each in read] == [None, "ValueError: it broke", None]
    assert [each.returned_reward for each in read] == [1.0, None, 1.0]
    assert read[0].branches == written[0].branches


def test_what_art_import_wrote_is_judged_where_a_judge_is_named(art: Art) -> None:
    """The file has rewards from another tool; without a judge or an output, the report uses them."""
    rows = rated([0.2, 0.8])
    write_lines(Path("t.jsonl"), [score_trajectory(row, 0.9 - row.index, []) for row in rows])
    code, out, err = judge(art, "t.jsonl", "-o", "s.jsonl", "--report")
    assert code != 0 and "no reward" in out + err, "these rollouts returned none, which the judge is asked for"
    code, out, _ = art("judge", "t.jsonl", "--report")
    assert code == 0 and "trajectories" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (plain("a", messages=[3]), "t.jsonl:2: Expected `object`, got `int`"),
        (plain("a", metrics={"win": "yes"}), "t.jsonl:2: Expected"),
        (plain("a", reward="high"), "t.jsonl:2: Expected"),
        (plain("a", reward=float("nan")), "the rollout returned no reward"),
        (plain("a", reward=1e308), "the reward 1e+308 is beyond 1e+30"),
        (own(returned_reward=float("inf")), "the rollout returned no reward"),
        (own(messages=3), "t.jsonl:2: Expected `array`, got `int`"),
        (own(turns=[{"logprobs": [float("nan")]}]), "t.jsonl:2: "),
        (json.dumps({"trajectories": [3]}), "t.jsonl:2: Expected `object`, got `int`"),
        (plain("@").replace('"@"', "[" * 900 + "]" * 900), "nested too deeply"),
        (
            plain("@").replace("@", "\xe9"),
            "not UTF-8",
        ),
    ],
)
def test_a_group_that_cannot_be_read_is_owed_and_the_others_are_judged(
    art: Art, place: Path, line: str, says: str
) -> None:
    Path("t.jsonl").write_bytes((f"{GOOD}{line}\n").encode("latin-1"))
    (place / "deep.py").write_text("def judge(group):\n    return [t.returned_reward for t in group]\n")
    judging = ["judge=function", "judge.entry=deep.py:judge"] if "[[[" in line else ["judge=rollout"]
    code, out, err = art("judge", "t.jsonl", *judging)
    assert_in_words(code, err)
    assert code == 1 and says in out and "1 group not scored and still owed" in err
    assert rewards("t.scored.jsonl") == {"good/0": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"messages": ' + b"[" * 50_000, "t.jsonl:2: JSON is nested too deeply"),
        (b'{"messages": [], "group_id": "\xff\xfe"}', "t.jsonl:2: the text is not UTF-8 (byte 30 of the line)"),
        (
            own(group_size=10**30).encode(),
            '"group_size" is 1000000000000000000000000000000, not between 1 and 1,000,000',
        ),
        (own(group_size=-3).encode(), '"group_size" is -3, not between'),
        (own(index=1).encode(), '"index" is 1, not between 0 and group_size - 1'),
        (own(index=-1).encode(), '"index" is -1'),
        (own(id=["a"]).encode(), '"id" and "group_id" of a trajectory are strings'),
        (own(group_id={"a": 1}).encode(), '"id" and "group_id" of a trajectory are strings'),
        (own(group_id="good").encode(), "group 'good' already exists in another format, in line 1"),
        (own().encode() + b"\n" + own(group_size=2, index=1, id="b").encode(), "t.jsonl:3: group 'odd' has 1 attempts"),
        (b"\x00\x01", "t.jsonl:2: JSON is malformed"),
    ],
)
def test_a_line_that_has_no_place_is_named(art: Art, line: bytes, says: str) -> None:
    Path("t.jsonl").write_bytes(GOOD.encode() + line + b"\n")
    code, _, err = judge(art, "t.jsonl")
    assert_in_words(code, err)
    assert code == 1 and says in err and "t.jsonl:" in err


def test_all_lines_that_have_no_place_are_named_at_once(art: Art) -> None:
    """A file with several is mended once, not once per line."""
    Path("t.jsonl").write_text(GOOD + "{\n" + GOOD.replace("good", "more") + '{"messages": []}\n' + "[1]\n" * 7)
    code, _, err = judge(art, "t.jsonl")
    assert code == 1 and "t.jsonl:2: JSON is malformed" in err
    assert err.endswith("; mend the line, or remove it (also lines 4, 5, 6, 7, 8 and 3 more)\n")


def read_own(path: Path) -> object:
    return list(read_lines(path, Trajectory))


def read_source(path: Path) -> object:
    source = TrajectoryFile(path)
    return [source.load(group) for group in source]


def read_scenarios(path: Path) -> object:
    return load_scenarios(path.name, path.parent)


def read_demos(path: Path) -> object:
    return [without_source(demo) for demo in load_demos(path.name, path.parent)]


EVERY = (
    '{"id": "a", "group_id": "g", "group_size": 1, "index": 0, "messages": [{"role": "assistant", "content": "é"}]}\n'
)
READERS = pytest.mark.parametrize("read", [read_own, read_source, read_scenarios, read_demos])


@READERS
def test_a_byte_order_mark_is_passed_over_by_every_reader(place: Path, read: Callable[[Path], object]) -> None:
    """Also in the middle, where two files with one were put together."""
    lines = EVERY, EVERY.replace('"a"', '"b"').replace('"g"', '"h"')
    (place / "plain.jsonl").write_text("".join(lines))
    (place / "marked.jsonl").write_bytes(b"".join(b"\xef\xbb\xbf" + line.encode() for line in lines))
    assert read(place / "marked.jsonl") == read(place / "plain.jsonl")


@READERS
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_another_encoding_is_called_by_its_name_by_every_reader(
    place: Path, read: Callable[[Path], object], encoding: str
) -> None:
    (place / "t.jsonl").write_bytes(EVERY.encode(encoding))
    with pytest.raises(DataError, match=rf"t\.jsonl: the text is {encoding[:6].upper()}; save it as UTF-8"):
        read(place / "t.jsonl")


@READERS
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(EVERY.encode()), "packed with gzip; unpack it first"),
        (b"\x28\xb5\x2f\xfd\x04\x00" + bytes(range(128, 180)), "packed with zstandard; unpack it first"),
        (b"PK\x03\x04\x14\x00" + bytes(range(128, 180)), "a zip archive or a spreadsheet; unpack it"),
    ],
)
def test_a_packed_file_is_called_so_by_every_reader(
    place: Path, read: Callable[[Path], object], data: bytes, words: str
) -> None:
    (place / "t.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=rf"t\.jsonl: {words}"):
        read(place / "t.jsonl")


@pytest.mark.parametrize("read", [read_own, read_demos])
def test_a_parquet_file_is_called_so_where_only_json_lines_are_read(
    place: Path, read: Callable[[Path], object]
) -> None:
    (place / "t.jsonl").write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    with pytest.raises(DataError, match=r"t\.jsonl: a Parquet file; write its rows as JSON lines"):
        read(place / "t.jsonl")


@pytest.mark.parametrize("read", [read_own, read_source, read_demos])
def test_what_pythons_json_writes_is_read(place: Path, read: Callable[[Path], object]) -> None:
    """json.dumps writes NaN, Infinity and half pairs; a number that is not finite is null, half a pair U+FFFD.

    Only scenarios refuse such a number, because it may be an answer.
    """
    record = json.loads(EVERY)
    odd = record | {"messages": [{"role": "assistant", "content": "a\ud800", "n": [float("nan"), float("inf")]}]}
    mended = record | {"messages": [{"role": "assistant", "content": "a\ufffd", "n": [None, None]}]}
    (place / "odd.jsonl").write_text(json.dumps(odd) + "\n")
    (place / "mended.jsonl").write_text(json.dumps(mended) + "\n")
    assert read(place / "odd.jsonl") == read(place / "mended.jsonl")


@READERS
def test_a_line_that_is_no_json_is_named_by_every_reader(place: Path, read: Callable[[Path], object]) -> None:
    for broken in (b'{"id": }', b'{"id": "\xff"}', b"[" * 50_000, b'{"a": ' * 50_000, b"[1]", b"9" * 5_000):
        (place / "t.jsonl").write_bytes(EVERY.encode() + broken + b"\n")
        with pytest.raises(DataError, match=r"t\.jsonl:2: ") as caught:
            read(place / "t.jsonl")
        assert len(str(caught.value)) < 1_000 and str(caught.value).isprintable()
