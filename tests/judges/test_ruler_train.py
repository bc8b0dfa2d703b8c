"""`art train` with RULER: the judge reads what was played, and the step is trained on its scores."""

import asyncio
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.loop.train import train
from art_cli.reports.run_report import read_report
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import RunError
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS

CONFIG = LETTERS / "config.yaml"


def share_of_letters(conversations: list[list[tuple[str, str]]]) -> float:
    """What tests/letters/rollout.py returns, told from the conversation."""
    said = "".join(text for role, text in conversations[-1] if role == "assistant")
    return sum(letter.isascii() and letter.isalpha() for letter in said) / max(len(said), 1)


def run(runs: Path, *overrides: str) -> RunDir:
    settings = ["train.steps=2", "eval=null", "train.seed=1", *overrides]
    return RunDir(asyncio.run(train(load_config(CONFIG, [f"runs={runs}", *settings]))).root)


@pytest.mark.slow
def test_a_judge_that_follows_the_rule_trains_as_the_rollouts_own_reward_does(tmp_path: Path) -> None:
    """Two steps of 3 groups of 4. Scores are rounded to six places; control characters are cleaned one for one."""
    own = run(tmp_path / "own")
    with serving(Conduct(rule=share_of_letters, misbehaviour="out_of_order")) as server:
        ruler = ["judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule", "judge.cache=null"]
        judged = run(tmp_path / "judged", *ruler)
    for step in range(2):
        rows = judged.scored(step)
        assert len(rows) == 12
        assert [row.reward for row in rows] == pytest.approx([row.returned_reward for row in rows], abs=1e-6)
        assert all(row.scores[0].judge == "ruler" for row in rows)
    rewards = [[line.metrics["reward_mean"] for line in files.metrics()] for files in (own, judged)]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-5)
    for line in judged.metrics():  # a call for each group, by a model without a known price
        assert line.metrics["judge_calls"] == 3 and line.metrics["judge_tokens"] > 0 and "judge_usd" not in line.metrics


@pytest.mark.slow
def test_a_judge_that_gives_no_usable_answer_stops_the_run_and_a_mended_one_goes_on(tmp_path: Path) -> None:
    with serving(Conduct(rule=share_of_letters, misbehaviour="seven")) as server:
        ruler = ["judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule", "judge.cache=null"]
        with pytest.raises(RunError, match="3 groups could not be judged .*no usable verdict"):
            run(tmp_path, *ruler)
        server.conduct = Conduct(rule=share_of_letters)
        files = run(tmp_path, *ruler)
    assert [len(files.scored(step)) for step in range(2)] == [12, 12]
    assert len({row.id for row in files.trajectories(0)}) == 12  # none was played again


@pytest.mark.slow
def test_a_judge_that_is_replaced_inside_a_run_is_found_when_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three calls per step; a different model answers in the second step."""
    models = [*["rule-1"] * 3, *["rule-2"] * 3]
    with serving(Conduct(rule=share_of_letters, models=models)) as server:
        files = run(
            tmp_path, "judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule", "judge.cache=null"
        )
    named = [{name for name in line.metrics if name.startswith("judged_by.")} for line in files.metrics()]
    assert named == [{"judged_by.rule-1"}, {"judged_by.rule-2"}]
    assert [line.metrics["judged_by.rule-2"] for line in files.metrics()[1:]] == [12]
    assert {row.scores[0].model_returned for row in files.scored(1)} == {"rule-2"}
    [found] = [each for each in read_report(files).findings if each.kind == "judge_changed"]
    assert found.step == 2 and "the judge's replies name rule-2 at step 2" in caplog.text
