"""Mutated files through every reader of judges, scenarios and demos: words, never a traceback; bounded memory.

Each mutation is read like in the command, and the failure message must pass `assert_in_words`. The whole command runs
on a part of them. `ART_FUZZ=10000` sets the number of mutations per kind.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.cli import app as cli
from art_cli.config.schema import RolloutJudgeConfig, RulerJudgeConfig
from art_cli.judges import make_judge
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.judges.files.session import Session
from art_cli.judges.judge_report import make_report, report_lines
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.learners.sft.examples import demo_samples, load_demos
from art_cli.reports.pages.judge_page import judge_page
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import ArtError, printable
from tests.support.attacks.hostile import NUM_MUTATIONS, MemoryBound, assert_in_words, mutations
from tests.support.models.tiny import tiny_tokenizer

Art = Callable[..., tuple[int, str, str]]
NUM_COMMANDS = max(8, NUM_MUTATIONS // 50)  # mutations that the whole command reads, a tenth of a second each
BOUND_MIB = 600  # the largest mutation has a million characters, 50 times over at most

CALLS = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You play."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": {"url": "data:,A"}}],
    },
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
    {"role": "assistant", "content": "done"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TURN = {
    "parent": None, "kept": 0, "prompt_ids": [1, 2], "sampled_ids": [3], "logprobs": [-0.5], "raw_logprobs": [-0.5],
    "step": 0, "temperature": 1.0,
}  # fmt: skip
SCORE = {
    "judge": "ruler", "model": "m", "score": 0.5, "explanation": "so", "votes": [0.25, 0.75], "spread": 0.3,
    "positions": [1, 0], "cost_usd": 0.01, "prompt_tokens": 10.0, "completion_tokens": 5, "latency_s": 1.5,
}  # fmt: skip


def written(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def own(group: str, index: int) -> dict[str, Any]:
    return {
        "schema_version": 1, "id": f"{group}-{index}", "group_id": group, "group_size": 2, "index": index, "step": 1,
        "scenario": {"id": "s"}, "messages": MESSAGES, "branches": [MESSAGES[:2]], "tools": TOOLS, "turns": [TURN],
        "metrics": {"win": 1.0}, "metadata": {"a": [1]}, "returned_reward": index / 2, "error": None,
    }  # fmt: skip


OWN = written([own(group, index) for group in ("g", "h") for index in range(2)])
SCORED = written(
    [
        own(group, index) | {"reward": index / 2, "scores": [SCORE], "judge_settings": "rollout"}
        for group in ("g", "h")
        for index in range(2)
    ]
)
ART_TRAJECTORY = {
    "messages_and_choices": [*MESSAGES[:-1], {"finish_reason": "stop", "index": 0, "message": MESSAGES[-1]}],
    "tools": TOOLS, "reward": 0.5, "metrics": {"won": True}, "metadata": {"id": 7}, "logs": ["a line"],
    "additional_histories": [{"messages_and_choices": MESSAGES[:2]}],
}  # fmt: skip
ART = written(
    [
        {
            "trajectories": [ART_TRAJECTORY] * 2,
            "metadata": {"s": "s"},
            "exceptions": [{"type": "ValueError", "message": "no"}],
        },
        {"trajectories": [ART_TRAJECTORY]},
    ]
)
PLAIN = written([{"messages": MESSAGES, "tools": TOOLS, "group_id": g, "reward": 0.5, "note": "n"} for g in "aab"])
SCENARIOS = written([{"id": f"s{n}", "question": "q", "level": n, "more": {"a": [1, None]}} for n in range(4)])
DEMOS = written([{"messages": MESSAGES, "tools": TOOLS}, {"messages": MESSAGES[:1] + MESSAGES[-1:]}])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def ruler(tmp_path_factory: pytest.TempPathFactory) -> RulerJudge:
    """Never asked: it writes its prompts, to count them."""
    config = RulerJudgeConfig(name="ruler", model="m", api_base="http://127.0.0.1:9/v1", cache=None, votes=2)
    return RulerJudge(config, tmp_path_factory.mktemp("ruler"))


def said(read: Callable[[], object]) -> ArtError | OSError | None:
    """Returns the failure of `read`, after checking that the message is readable."""
    try:
        read()
    except Exception as error:  # as in cli.run, where every failure of a command ends
        lines, code = cli.report(error)
        assert_in_words(code, "\n".join(printable(line, limit=cli.MAX_ERROR) for line in lines))
        assert isinstance(error, ArtError), error
        return error
    return None


def played(good: bytes, path: Path, *, seed: int, count: int = NUM_MUTATIONS) -> Iterator[Path]:
    """The file with successive mutations."""
    with MemoryBound(mib=BOUND_MIB):
        for data in mutations(good, seed=seed, count=count):
            path.write_bytes(data)
            yield path


def judge_file(path: Path, output: Path, ruler: RulerJudge) -> None:
    """As `art judge` reads a file: RULER's prompts of each group, the rewards to `output`, and `output` once more."""
    source = TrajectoryFile(path)
    for group in source:
        try:
            ruler.estimate(source.load(group))
        except ArtError:
            continue
        except RecursionError:
            pass  # the command says that it is nested too deeply
    judge = make_judge(RolloutJudgeConfig(), path.parent)
    first = asyncio.run(Session(judge, source, output, is_partial=True).run())
    again = asyncio.run(Session(judge, source, output, is_partial=True).run())
    assert again.groups == 0 and again.groups_before == first.groups
    for scored in read_lines(output, ScoredTrajectory):
        assert (scored.reward is None) == (scored.error is not None)


@pytest.mark.slow
@pytest.mark.parametrize("good", [OWN, ART, PLAIN, SCORED], ids=["own", "art", "plain", "scored"])
def test_any_file_is_judged_or_refused_in_words(good: bytes, place: Path, ruler: RulerJudge) -> None:
    """The output contains only complete groups with rewards, regardless of other lines in the file."""
    for path in played(good, place / "t.jsonl", seed=1):
        output = place / "s.jsonl"
        output.unlink(missing_ok=True)
        said(lambda path=path, output=output: judge_file(path, output, ruler))


@pytest.mark.slow
def test_any_output_is_gone_on_with_or_refused_in_words(place: Path) -> None:
    """Rejected output stays unchanged except for a torn last line; resumed output ends complete."""
    (place / "t.jsonl").write_bytes(OWN)
    source, judge = TrajectoryFile(place / "t.jsonl"), make_judge(RolloutJudgeConfig(), place)
    for path in played(SCORED, place / "s.jsonl", seed=2):
        before = path.read_bytes()
        failure = said(lambda path=path: asyncio.run(Session(judge, source, path).run()))
        if failure is not None:
            assert before.startswith(path.read_bytes()) or path.read_bytes() == before + b"\n"
            continue
        rows = list(read_lines(path, ScoredTrajectory))
        assert {row.id: row.reward for row in rows if row.error is None}.items() <= {
            "g-0": 0.0, "g-1": 0.5, "h-0": 0.0, "h-1": 0.5,
        }.items()  # fmt: skip
        assert {row.id for row in rows} == {"g-0", "g-1", "h-0", "h-1"}


@pytest.mark.slow
def test_any_scored_file_is_reported_on_or_refused_in_words(place: Path) -> None:
    def report(path: Path, gold: str | None) -> None:
        found, sample = make_report(path, gold=gold)
        lines = report_lines(found)
        assert all(printable(value, limit=10**9) == value for line in lines for value in line)
        judge_page(msgspec.to_builtins(found), msgspec.to_builtins(sample), lines)
        found.values()

    golds = itertools.cycle((None, "returned_reward", "metrics.win"))
    for path in played(SCORED, place / "s.jsonl", seed=3):
        said(lambda path=path: report(path, next(golds)))


def test_any_file_of_scenarios_is_read_or_refused_in_words(place: Path) -> None:
    for path in played(SCENARIOS, place / "s.jsonl", seed=5):
        said(lambda path=path: msgspec.json.encode(load_scenarios(path.name, path.parent)))


def test_any_file_of_demos_is_read_or_refused_in_words(place: Path) -> None:
    """Made into samples as well: the chat template is somebody's program, and raises what it likes."""
    tokenizer = tiny_tokenizer()

    def read(path: Path) -> None:
        for number, demo in enumerate(load_demos(path.name, path.parent)):
            if len(json.dumps(demo)) < 100_000:  # a long one is tokenized slowly, and says nothing new
                samples = demo_samples(demo, tokenizer, name=f"demo {number}", max_length=1024)
                assert all(len(sample.targets) for sample in samples)

    failures = [said(lambda path=path: read(path)) for path in played(DEMOS, place / "d.jsonl", seed=6)]
    assert any(failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "arguments"),
    [
        (ART, ["judge=rollout", "--fresh", "--json"]),
        (PLAIN, ["judge.api_base=http://127.0.0.1:9/v1", "judge.cache=null", "--dry-run"]),
        (SCORED, ["--report", "--gold", "metrics.win", "--html", "r.html", "--gate", "pairwise_accuracy>=0.1"]),
    ],
    ids=["art", "dry run", "report"],
)
def test_the_whole_command_answers_any_file_in_words(good: bytes, arguments: list[str], place: Path, art: Art) -> None:
    for path in played(good, place / "t.jsonl", seed=7, count=NUM_COMMANDS):
        code, out, err = art("judge", path.name, *arguments)
        assert_in_words(code, err)
        assert "\x1b" not in out and "\x00" not in out
