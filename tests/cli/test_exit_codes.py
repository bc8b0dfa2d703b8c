"""Commands that did nothing useful end with exit code 1 and one sentence that names the cause.

pytest tests/cli/test_exit_codes.py -s | grep ': exit'      prints each command, its exit code and its sentence
"""

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from art_cli import ruler_score_group
from art_cli.cli import step
from art_cli.reports.run_report import read_report
from art_cli.runs.durable import write_lines
from art_cli.runs.history import Failures, find_fault
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import UsageError
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS
from tests.support.processes import forked
from tests.support.processes.waiting import until
from tests.support.records.attempts import scored

Art = Callable[..., tuple[int, str, str]]

FAILS = """
async def rollout(policy, scenario):
    raise KeyError("anwser")
"""
SILENT = """
from art_cli import Outcome
async def rollout(policy, scenario):
    return Outcome(reward=float(len(scenario["id"])))
"""
EQUAL = """
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": "hi"}]
    await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return 0.5
"""
VARIED = """
import random
from pathlib import Path
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": "hi"}]
    await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return 0.5 if Path("equal").exists() else random.random()
"""
SMALL = ["rollout.groups_per_step=2", "rollout.group_size=2", "train.steps=2"]


class Case(NamedTuple):
    """One command that was green. `sentence` is a part of its last line on standard error."""

    rollout: str
    sentence: str


CASES = {
    "every-attempt-failed": Case(
        FAILS, "every attempt failed: {num} of {num} failed, {num} of them with KeyError: 'anwser' ("
    ),
    "no-attempt-called-the-model": Case(SILENT, "no attempt called the model; try: policy.client, or policy.base_url"),
    "no-group-has-signal": Case(EQUAL, "no signal: rewards within each of {groups} groups are equal, so nothing can"),
}


SEEN: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Prints what every command ended with."""
    yield
    print("\n" + "\n".join(dict.fromkeys(SEEN)))


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The letters task, in the working directory; a test puts its rollout there."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expect(code: int, err: str, sentence: str, command: str) -> None:
    last = err.splitlines()[-1] if err else ""
    SEEN.append(f"{command}: exit {code}: {last}")
    assert (code, last.startswith("error: "), sentence in last) == (1, True, True), err


WAITS = """
import asyncio, time
from pathlib import Path
def build(directory):
    Path("waits").touch()
    time.sleep(600)
async def rollout(policy, scenario):
    Path("waits").touch()
    await asyncio.sleep(600)
"""
REST = "interrupted; what is played is in out; the same command plays the rest"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "entry"),
    [
        (signal.SIGTERM, "rollout.entry=waits.py:rollout"),
        (signal.SIGINT, "rollout.entry=waits.py:rollout"),
        (signal.SIGTERM, "model.base=waits.py:build"),
    ],
)
@pytest.mark.parametrize(
    ("command", "last"),
    [
        (["eval", "config.yaml", "--checkpoint", "base", "-o", "out"], REST),
        (["eval", "config.yaml", "--checkpoint", "base"], "interrupted; nothing is kept without -o DIR"),
        (["generate", "config.yaml", "-o", "out"], REST),
        (["hunt", "config.yaml"], "interrupted: the hunt stopped early; with -o FILE the same command continues"),
        (["train", "config.yaml"], "interrupted"),
    ],
)
async def test_a_signal_while_loading_or_playing_ends_with_what_is_kept(
    project: Path, command: list[str], last: str, entry: str, number: signal.Signals
) -> None:
    (project / "waits.py").write_text(WAITS)
    process = forked.Forked([*command, entry], stdout=forked.PIPE, stderr=forked.PIPE)
    try:
        await until((project / "waits").exists, 120)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and err.splitlines()[-1].startswith(last), err
        assert "Traceback" not in err
    finally:
        process.kill()


@pytest.mark.slow
def test_train_and_report_are_red_after_a_run_that_learned_nothing(art: Art, project: Path, case: Case) -> None:
    """Two steps of 2 x 2 attempts, too few for the watch on the first 16; then the finished run again."""
    (project / "rollout.py").write_text(case.rollout)
    sentence = case.sentence.format(num=8, groups=4)
    for _ in range(2):  # the second finds nothing left to do
        code, out, err = art("train", "config.yaml", *SMALL, "eval=null")
        expect(code, err, sentence, "art train")
        assert "finished, 2 steps" in out
    code, out, err = art("report", "runs/letters", "--html", "report.html")
    expect(code, err, sentence, "art report")
    assert "nothing went wrong" not in out and "what went wrong, and what to try" in out
    assert "Nothing that the numbers show" not in Path("report.html").read_text()


@pytest.mark.slow
def test_generate_is_red_where_nothing_can_be_learned(art: Art, project: Path, case: Case) -> None:
    (project / "rollout.py").write_text(case.rollout)
    code, _, err = art("generate", "config.yaml", *SMALL, "-o", "out.jsonl")
    expect(code, err, case.sentence.format(num=4, groups=2), "art generate")


@pytest.mark.slow
def test_eval_is_red_where_nothing_was_measured(art: Art, project: Path, case: Case) -> None:
    """Equal rewards are what an evaluation may well find."""
    (project / "rollout.py").write_text(case.rollout)
    code, out, err = art("eval", "config.yaml", "--checkpoint", "base")
    if case.rollout == EQUAL:
        assert (code, "0.500" in out) == (0, True)
    else:
        expect(code, err, case.sentence.format(num=5, groups=0), "art eval")


@pytest.mark.slow
def test_a_resumed_run_is_judged_as_a_whole(art: Art, project: Path) -> None:
    """Step 1 has signal. Step 2 has none, and the run stays green; a run with them in the other order, too."""
    (project / "rollout.py").write_text(VARIED)
    settings = [*SMALL[:2], "eval=null"]
    assert art("train", "config.yaml", *settings, "train.steps=1")[0] == 0
    (project / "equal").touch()
    assert art("train", "config.yaml", *settings, "train.steps=2")[0] == 0
    assert art("report", "runs/letters")[0] == 0
    assert art("train", "config.yaml", *settings, "train.steps=1", "name=late")[0] == 1
    (project / "equal").unlink()
    code, out, _ = art("train", "config.yaml", *settings, "train.steps=2", "name=late", "--json")
    assert (code, json.loads(out)["fault"]) == (0, None)


@pytest.mark.slow
def test_a_critic_needs_no_differing_rewards(art: Art, project: Path) -> None:
    """PPO learns from groups of one. What counts is that the learner changed weights."""
    (project / "rollout.py").write_text(EQUAL)
    ppo = ["loss=ppo", "rollout.group_size=1", "rollout.groups_per_step=2", "train.steps=1", "eval=null"]
    code, _, err = art("train", "config.yaml", *ppo)
    assert code == 0, err
    assert art("generate", "config.yaml", *ppo, "-o", "out.jsonl")[0] == 0


@pytest.mark.slow
def test_a_run_whose_last_evaluation_failed_throughout_is_red(art: Art, project: Path) -> None:
    """Training fares well: the scenarios of the evaluation alone make the agent fail."""
    text = VARIED.replace("    messages =", '    scenario["ask"]\n    messages =')
    (project / "rollout.py").write_text(text)
    (project / "held.jsonl").write_text('{"id": "h"}\n')
    code, _, err = art("train", "config.yaml", *SMALL[:2], "train.steps=1", "eval.scenarios=held.jsonl")
    expect(code, err, "evaluation at step 1: every attempt failed: 1 of 1 failed with KeyError: 'ask' (", "art train")


@pytest.mark.parametrize("more", [{}, {"num_updates": 1.0, "turns": 4.0}], ids=["older-version", "teacher"])
def test_a_run_is_green_unless_its_numbers_say_that_it_learned_nothing(
    art: Art, tmp_path: Path, more: dict[str, float]
) -> None:
    """An older version did not count updates and calls. A teacher's step changes weights without any rewards."""
    run = RunDir(tmp_path / "old")
    run.root.mkdir()
    counts = {"num_trajectories": 4.0, "num_failed": 0.0, "num_groups": 2.0, "no_signal_share": 1.0}
    run.append_metrics(0, "train", counts | more)
    code, out, _ = art("report", run.root)
    assert (code, "nothing went wrong that the numbers show" in out) == (0, True)


def test_no_fault_is_found_in_nothing_and_the_worst_comes_first() -> None:
    none, some, every = (Failures(num, 4, "x", num) if num else Failures(0, 4, "", 0) for num in (0, 2, 4))
    assert find_fault(Failures(0, 0, "", 0), is_called=False) is None
    assert find_fault(none, is_called=True) is find_fault(some, is_called=True) is None
    found = [
        find_fault(every, is_called=False, num_without_signal=2),
        find_fault(some, is_called=False, num_without_signal=2),
        find_fault(some, is_called=True, num_without_signal=2),
    ]
    assert [fault and fault.kind for fault in found] == ["all_failed", "no_calls", "nothing_learned"]
    assert all("2 of 4 failed" in str(fault) for fault in found[1:])


# --- art step, art judge ----------------------------------------------------------------------------------------------


def write_scored(path: Path, rewards: list[float], **changed: Any) -> Path:
    changed = {"group_size": len(rewards), **changed}
    attempts = [scored("g", index, reward, **changed) for index, reward in enumerate(rewards)]
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in attempts))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "changed", "sentence"),
    [
        ([0.0, 1.0], {"turns": []}, "no token ids were recorded, so art step cannot train; art sft can"),
        ([0.5, 0.5], {}, "no checkpoint is written: no signal: rewards within the one group are equal"),
        ([0.5], {"group_size": 2}, "no group is complete, of 1 attempts"),
    ],
    ids=["no-tokens", "no-signal", "no-complete-group"],
)
def test_step_is_red_and_writes_nothing_where_nothing_can_be_learned(
    art: Art, project: Path, rewards: list[float], changed: dict[str, Any], sentence: str
) -> None:
    code, _, err = art("step", "config.yaml", write_scored(project / "s.jsonl", rewards, **changed), "-o", "next")
    expect(code, err, sentence, "art step")
    assert not Path("next").exists()


@pytest.mark.parametrize(
    ("line", "changed", "sentence"),
    [
        (1, {"index": 0}, "index 0 of group 'g' is id 'g-1', but id 'g-0' in line 1"),
        (1, {"index": 2}, "index 2 is not in a group of 2"),
        (1, {"index": -1}, "index -1 is not in a group of 2"),
        (1, {"group_size": 3}, "the group_size of 'g' is 3, but 2 in line 1"),
        (2, {"id": "g-0"}, "id 'g-0' is index 0 of group 'h', but index 0 of group 'g' in line 1"),
    ],
)
def test_step_refuses_lines_that_claim_another_attempts_place(
    art: Art, project: Path, line: int, changed: dict[str, Any], sentence: str
) -> None:
    """Such a line would drop its whole group, or mix up two attempts."""
    rows = [msgspec.to_builtins(scored(name, index, float(index), group_size=2)) for name in "gh" for index in range(2)]
    rows[line] |= changed
    Path("s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = art("step", "config.yaml", "s.jsonl", "-o", "next")
    assert (code, Path("next").exists()) == (1, False)
    assert err.splitlines()[-1].startswith(f"error: s.jsonl:{line + 1}: {sentence}")


def test_step_names_incomplete_groups_and_takes_the_last_of_repeated_lines(project: Path, caplog: Any) -> None:
    rows = [msgspec.to_builtins(scored("g", index, 0.0, group_size=2)) for index in (0, 1, 1)]
    rows += [msgspec.to_builtins(scored("h", 0, 1.0, group_size=2))]
    rows[2]["reward"] = 1.0
    Path("s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.reward for each in step._read(Path("s.jsonl"))] == [0.0, 0.0, 1.0, 1.0]
    assert "group h is left out, because it has 1 of 2 attempts" in caplog.text


@pytest.mark.slow
def test_judge_without_a_key_is_red_before_any_call(art: Art, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")  # put back afterwards, whatever a .env file has set
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it went to the network"))
    path = write_scored(project / "s.jsonl", [0.0, 1.0])
    code, _, err = art("judge", path, "-o", "out.jsonl", "--model", "openai/gpt-6-luna")
    last = err.splitlines()[-1]
    SEEN.append(f"art judge: exit {code}: {last}")
    assert (code, last) == (
        2,
        "error: judge: OPENAI_API_KEY is not set, and openai/gpt-6-luna needs it; set it in the environment or in .env",
    )
    with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
        asyncio.run(ruler_score_group([{"messages": []}, {"messages": []}]))


@pytest.mark.slow
def test_a_judge_that_compares_is_not_paid_for_single_attempts(art: Art, project: Path) -> None:
    """Two conversations alone and a pair: one call. Alone only: red, without a call."""
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    alone = [{"group_id": name, "messages": talk} for name in ("a", "b")]
    pair = [{"group_id": "c", "messages": [talk[0], {"role": "assistant", "content": text}]} for text in ("4", "22")]
    for name, rows in (("both.jsonl", alone + pair), ("alone.jsonl", alone)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(Conduct(rule=lambda talks: float("22" not in str(talks)))) as server:
        judge = ["judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule", "judge.cache=null"]
        code, out, err = art("judge", "both.jsonl", *judge, "judge.votes=1")
        assert (code, server.num_answered) == (0, 1), err
        assert "2 groups skipped: a single attempt cannot be compared" in out
        code, _, err = art("judge", "alone.jsonl", *judge)
        expect(code, err, "no group has two attempts to compare, of 2; play several at each scenario", "art judge")
        assert server.num_answered == 1


@pytest.mark.slow
def test_a_function_judge_gives_evaluations_a_reward_that_gates_can_bound(art: Art, project: Path) -> None:
    """The rollouts return none. The function gives 0.25 to each attempt, also where one policy is evaluated alone."""
    (project / "rollout.py").write_text(VARIED.replace("return 0.5 if", "return None if"))
    Path("equal").touch()
    (project / "judge.py").write_text("def judge(group):\n    return [0.25 for _ in group]\n")
    judge = ["judge=function", "judge.entry=judge.py:judge"]
    code, _, err = art("train", "config.yaml", *SMALL[:1], *judge, "train.steps=1", "eval.every=1")
    run = RunDir(project / "runs/letters")
    found = [run.evaluation(step) for step in (0, 1)]
    assert [each and each.reward_is for each in found] == ["judge", "judge"], err
    assert all(each and set(each.values["reward"].values()) == {0.25} for each in found)
    assert read_report(run).reward_names == {"train": "function score", "eval": "reward"}
    for bound, wanted in (("reward>=0.25", 0), ("reward>=0.3", 1)):
        code, _, err = art("eval", "config.yaml", *judge, "--checkpoint", run.root, "--gate", bound)
        assert code == wanted, err


@pytest.mark.slow
def test_a_judged_evaluation_names_its_reward_by_what_it_is(art: Art, project: Path) -> None:
    """The rollouts return none: the first evaluation is half of the wins against itself, the steps have scores.

    It asks no judge, also where its file has an attempt at a scenario that is no longer evaluated on.
    """
    (project / "rollout.py").write_text(VARIED.replace("return 0.5 if", "return None if"))
    Path("equal").touch()
    with serving(Conduct(rule=lambda talks: float(len(str(talks)) % 7))) as server:
        judge = ["judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule", "judge.cache=null"]
        old = Trajectory(id="e0000-g0000-a00", group_id="old", group_size=1, index=0, scenario={"id": "old"})
        write_lines(RunDir(project / "runs/letters").eval_path(0), [old])
        code, out, err = art("train", "config.yaml", *SMALL[:1], *judge, "train.steps=1", "eval.every=1")
    run = RunDir(project / "runs/letters")
    judged = [*run.scored(0), *run.lines(run.eval_path(1), Trajectory)]
    assert (code, server.num_answered) == (0, len({each.group_id for each in judged})), err
    assert "share of wins" in out.splitlines()[1] and "eval at step 0: failed 0.000  share of wins 0.500" in err
    assert [json.loads(run.evaluation_path(step).read_bytes())["reward_is"] for step in (0, 1)] == ["wins", "wins"]
    assert [line.metrics["reward"] for line in run.metrics() if line.split == "eval"][0] == 0.5  # under its old name
