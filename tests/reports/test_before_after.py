"""`art report RUN --conversation`: one held-out conversation before and after."""

from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.reports.before_after import read_before_after
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import Evaluation, RunDir
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import RunError

Art = Callable[..., tuple[int, str, str]]


def attempt(scenario: str, said: str, reward: float | None, *, error: str | None = None) -> Trajectory:
    messages: list[Json] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{scenario}?"}]
    messages.append({"role": "assistant", "content": said})
    return Trajectory(
        id=f"{scenario}-{said}", group_id=scenario, group_size=1, index=0, scenario={"id": scenario},
        messages=messages, returned_reward=reward, error=error,
    )  # fmt: skip


def make_run(root: Path, evaluations: dict[int, list[Trajectory]]) -> RunDir:
    run = RunDir(root)
    for step, attempts in evaluations.items():
        rewards = {str(each.scenario["id"]): each.returned_reward or 0.0 for each in attempts}
        run.write_evaluation(step, Evaluation(seconds=1.0, values={"reward": rewards}))
        write_lines(run.eval_path(step), attempts)
        run.append_metrics(step, "eval", {"reward": sum(rewards.values()) / len(rewards)})
    return run


def test_the_scenario_whose_reward_rose_most_is_shown_from_the_first_and_the_best_evaluation(tmp_path: Path) -> None:
    """b rises by 0.9 from step 0 to step 4, which has the best mean; a rises by 0.5."""
    run = make_run(
        tmp_path / "mine",
        {
            0: [attempt("a", "x", 0.5), attempt("b", "no", 0.1), attempt("c", "-", 0.0, error="timeout: 1 s")],
            4: [attempt("a", "y", 1.0), attempt("b", "yes", 1.0), attempt("c", "z", 1.0)],
            8: [attempt("a", "q", 0.0), attempt("b", "r", 1.0), attempt("c", "s", 0.0)],
        },
    )
    found = read_before_after(run)
    assert (found.scenario, found.before.step, found.after.step) == ("b", 0, 4)
    assert [message.segments[0].text for message in found.shared] == ["Be short.", "b?"]
    assert found.before.messages[0].segments[0].text == "no" and found.after.messages[0].segments[0].text == "yes"


def test_the_command_shows_both_conversations_the_curve_and_what_comes_next(tmp_path: Path, art: Art) -> None:
    evaluations = {0: [attempt("b", "no\x1b[2J" + "o" * 500, 0.25)], 4: [attempt("b", "", 1.0)]}
    run = make_run(tmp_path / "mine", evaluations)
    code, out, _ = art("report", run.root, "--conversation")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1] == "A held-out scenario, b, before and after the training"
    assert lines[2:5] == ["(1 messages before it are not shown)", "user b?", ""]
    assert "before (step 0, reward 0.25)" in lines and "after (step 4, reward 1)" in lines
    assert "\x1b" not in out and "o" * 300 not in out and "..." in out and "assistant (nothing)" in lines
    bars = [line.count("█") for line in lines if line.startswith("step")]
    assert bars == [10, 40]
    assert lines[-2:] == [f"art view {run.root}", f"art serve {run.root}"]


def test_equal_conversations_are_shown_as_such(tmp_path: Path, art: Art) -> None:
    run = make_run(tmp_path / "mine", {0: [attempt("b", "same", None)], 4: [attempt("b", "same", None)]})
    assert read_before_after(run).before.messages == ()
    assert art("report", run.root, "--conversation")[0] == 0


@pytest.mark.parametrize("num", [0, 1])
def test_a_run_without_two_evaluations_is_one_line(tmp_path: Path, art: Art, num: int) -> None:
    run = make_run(tmp_path / "mine", dict.fromkeys(range(num), [attempt("a", "x", 0.0)]))
    run.append_metrics(0, "train", {"reward_mean": 0.0})
    with pytest.raises(RunError, match="no two evaluations"):
        read_before_after(run)
    code, _, err = art("report", run.root, "--conversation")
    assert code == 1 and err.count("\n") == 1
