"""Extra rounds of votes on noisy groups: selection, votes, cost, and resume after a kill."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import (
    BlendJudgeConfig,
    FunctionJudgeConfig,
    NoiseConfig,
    PriceConfig,
    RolloutJudgeConfig,
    RulerJudgeConfig,
)
from art_cli.judges import Judge, Verdict, make_judge, settings_of
from art_cli.judges.blend import BlendJudge
from art_cli.judges.judge_groups import ask_extra_rounds, is_hidden, judge_group
from art_cli.judges.reliability import error_variance, is_left_out
from art_cli.judges.rollout_judge import RolloutJudge
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import AskedAgain, Trajectory
from art_cli.runtime.errors import JudgeStopped, UsageError
from tests.support.judges.judge_server import Conduct, JudgeServer, serving
from tests.support.judges.ruler_cases import rated
from tests.support.paths import LETTERS
from tests.support.processes.waiting import until

HIDDEN = rated([0.5, 0.51, 0.52, 0.53])  # with a bound of 1 every difference is hidden, unless the votes agree


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer() as running:
        yield running


def make(server: JudgeServer, *, ask: int = 2, bound: float = 1.0, **settings: Any) -> RulerJudge:
    given = {"model": "rule", "api_base": server.api_base, "cache": None, "votes": 2, "timeout_s": 5.0} | settings
    config = RulerJudgeConfig(name="ruler", noise=NoiseConfig(ask_again=ask, min_reliability=bound), **given)
    judge = RulerJudge(config, Path("."), first_delay_s=0.001)
    judge.noise = config.noise
    return judge


class Scripted(Judge):
    """Attempts a and b with these votes: two in the first round, one per extra round."""

    has_rounds = True

    def __init__(self, *votes: tuple[float, float], **noise: Any) -> None:
        self.votes, self.asked = votes, list[int]()
        self.noise = NoiseConfig(**noise)

    async def judge_again(self, group: Sequence[Trajectory], num_rounds: int) -> Mapping[str, Verdict]:
        self.asked.append(num_rounds)
        return self.verdicts(num_rounds)

    def verdicts(self, num_rounds: int) -> dict[str, Verdict]:
        votes = [[vote[place] for vote in self.votes[: num_rounds + 1]] for place in range(2)]
        variance = error_variance(votes)
        return {
            name: Verdict(reward=statistics.fmean(own), variance=variance)
            for name, own in zip("ab", votes, strict=True)
        }


async def test_rounds_go_on_until_the_attempts_are_told_apart() -> None:
    """Differences d of the votes on a and b: 1, -1, then 1 in each round. For their mean D over V votes s^2 = D^2 / 2,
    and v = sum (d - D)^2 / 2 / (V - 1) / V. V = 2: D = 0. V = 3: s^2 = 1/18, v = 2/9. V = 4: s^2 = v = 1/8. V = 5:
    s^2 = 9/50, v = 2/25, reliability 5/9, which is above 1/4. Rewards 1/5 and 4/5."""
    judge = Scripted((0, 1), (1, 0), *[(0.0, 1.0)] * 6, ask_again=6, min_reliability=0.25)
    verdicts, again = await ask_extra_rounds(judge, rated([0.0, 1.0]), judge.verdicts(1))
    assert judge.asked == [2, 3, 4] and again == AskedAgain(rounds=3, cost_usd=0.0)
    assert [verdicts[name].reward for name in "ab"] == [0.2, 0.8]
    assert verdicts["a"].variance == pytest.approx(2 / 25)


async def test_rounds_end_with_the_allowed_number() -> None:
    judge = Scripted((0, 1), (1, 0), (0, 1), (1, 0), (0, 1), ask_again=2)
    _, again = await ask_extra_rounds(judge, rated([0.0, 1.0]), judge.verdicts(1))
    assert judge.asked == [2, 3] and again is not None and again.rounds == 2


def test_only_votes_that_differ_hide_a_ranking() -> None:
    def verdicts(*rewards: float, variance: float | None) -> dict[str, Verdict]:
        return {str(index): Verdict(reward=reward, variance=variance) for index, reward in enumerate(rewards)}

    assert is_hidden(verdicts(0.5, 0.5, variance=0.1), 0.0)  # two votes contradict each other
    assert not is_hidden(verdicts(0.5, 0.5, variance=0.0), 0.0)  # two votes find the attempts equal
    assert not is_hidden(verdicts(0.0, 1.0, variance=0.1), 0.5)  # s^2 = 0.5, reliability 0.8
    assert is_hidden(verdicts(0.0, 1.0, variance=0.1), 0.8)
    assert not is_hidden(verdicts(0.0, 1.0, variance=None), 0.8) and not is_hidden({}, 0.8)


async def test_only_a_hidden_group_is_asked_again_and_all_its_votes_count_together(server: JudgeServer) -> None:
    """Two votes a round, bound 0.99. The clear group gets two votes with noise 0.01. Nearly equal attempts with
    noise 0.2 get 2 + 2 x 2; the score is the mean of all six, and the variance that of six."""
    server.conduct = Conduct(noise=0.01)
    judge = make(server, bound=0.99)
    clear = await judge_group(judge, rated([0.0, 1.0, 0.05, 0.95]))
    assert len(server.asked) == 2 and all(each.again is None for each in clear)
    server.conduct = Conduct(noise=0.2)
    hidden = await judge_group(judge, HIDDEN)
    await judge.close()
    assert len(server.asked) == 2 + 6 and judge.num_cached == 0
    assert is_left_out(hidden)
    for each in hidden:
        [score] = each.scores
        assert len(score.votes) == 6 and each.reward == pytest.approx(sum(score.votes) / 6)
        assert each.again is not None and each.again.rounds == 2
    variance = error_variance([each.scores[0].votes for each in hidden])
    assert variance is not None
    assert hidden[0].noise is not None and hidden[0].noise.variance == pytest.approx(variance)


async def test_the_further_rounds_cost_what_their_calls_cost(server: JudgeServer) -> None:
    """One group and six calls, four of them extra: extra tokens and dollars are the total minus two calls."""
    server.conduct = Conduct(noise=0.2)
    price = PriceConfig(input=1.0, output=2.0)
    judge = make(server, price=price)
    await judge.judge(HIDDEN)
    before = judge.usage
    scored = await judge_group(judge, HIDDEN)
    after = judge.usage
    await judge.close()
    shares = [each.again for each in scored if each.again is not None]
    assert len(shares) == 4 and after.calls - before.calls == 4 and judge.num_cached == 2
    assert before.cost_usd is not None and after.cost_usd is not None
    assert sum(share.tokens for share in shares) == pytest.approx(after.tokens - before.tokens)
    assert sum(share.cost_usd or 0 for share in shares) == pytest.approx(after.cost_usd - before.cost_usd)


@pytest.mark.parametrize("answered", [1, 3, 5])
async def test_after_a_kill_no_vote_is_asked_for_twice(server: JudgeServer, tmp_path: Path, answered: int) -> None:
    """Broken off after so many of the six votes. A new process asks for the remaining votes, including the vote in
    flight.
    """
    server.conduct = Conduct(noise=0.2, delay_s=0.01)
    cache = {"cache": tmp_path / "v.sqlite", "concurrency": 1}
    killed = make(server, **cache)
    task = asyncio.create_task(judge_group(killed, HIDDEN))
    await until(lambda: len(server.asked) > answered)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await killed.close()
    again = make(server, **cache)
    scored = await judge_group(again, HIDDEN)
    await again.close()
    assert len(scored[0].scores[0].votes) == 6
    assert (again.usage.calls, again.num_cached) == (6 - answered, answered)


async def test_the_parts_of_a_large_group_are_asked_again_about_the_same_attempts(server: JudgeServer) -> None:
    """10 attempts, 4 per call: all rounds share the first round's anchors, so no prompt changes."""
    server.conduct = Conduct(noise=0.2)
    judge = make(server, ask=1, max_group=4)
    first = await judge.judge(rated([0.5 + index / 1000 for index in range(10)]))
    num_first = len(server.asked)
    scored = await judge_group(judge, rated([0.5 + index / 1000 for index in range(10)]))
    await judge.close()
    assert len(server.asked) == 2 * num_first and len(first) == 10
    assert all(len(each.scores[0].votes) == 4 and each.again is not None for each in scored)


async def test_a_round_in_vain_leaves_what_was_said_before(server: JudgeServer) -> None:
    server.conduct = Conduct(noise=0.2)
    judge = make(server, attempts=1, retries=0)
    first = await judge.judge(HIDDEN)
    server.conduct = Conduct(misbehaviour="empty")
    scored = await judge_group(judge, HIDDEN)
    await judge.close()
    assert [each.reward for each in scored] == [first[each.id].reward for each in scored]
    assert all(each.again is None and len(each.scores[0].votes) == 2 for each in scored)


async def test_a_spent_budget_leaves_the_group_owed(server: JudgeServer) -> None:
    server.conduct = Conduct(noise=0.2)
    judge = make(server, budget_tokens=3_000)
    with pytest.raises(JudgeStopped):
        await judge_group(judge, HIDDEN)
    await judge.close()


async def test_in_a_blend_the_judges_with_votes_are_asked_again(server: JudgeServer) -> None:
    """The rollout's own reward stays, half of it: reward = (votes' mean + returned) / 2."""
    server.conduct = Conduct(noise=0.2)
    config = BlendJudgeConfig(name="blend", blend={"ruler": 1, "rollout": 1}, noise=NoiseConfig(ask_again=1))
    blend = BlendJudge(
        config, Path("."), judges={"ruler": make(server), "rollout": RolloutJudge(RolloutJudgeConfig(), Path("."))}
    )
    blend.noise = NoiseConfig(ask_again=1, min_reliability=1.0)
    scored = await judge_group(blend, rated([0.5, 0.51, 0.52, 0.53], returned_reward=0.5))
    await blend.close()
    for each in scored:
        ruler, rollout = each.scores
        assert len(ruler.votes) == 4 and rollout.score == 0.5
        assert each.reward == pytest.approx((ruler.score + 0.5) / 2)


OWN = """
from art_cli import Judge, Verdict
class Mine(Judge):
    has_rounds = {rounds}
    async def judge(self, group):
        return await self.judge_again(group, 1)
    async def judge_again(self, group, num_rounds):
        return {{t.id: Verdict(reward=t.index * num_rounds, variance=1.0 / num_rounds) for t in group}}
"""


def own(tmp_path: Path, *, rounds: bool, **noise: Any) -> Judge:
    name = "with_rounds.py" if rounds else "without.py"
    (tmp_path / name).write_text(OWN.format(rounds=rounds))
    return make_judge(FunctionJudgeConfig(name="function", entry=f"{name}:Mine", noise=NoiseConfig(**noise)), tmp_path)


async def test_a_class_of_the_users_own_is_asked_again_if_it_says_that_it_can_be(tmp_path: Path) -> None:
    """Rewards 0 and 1, variance 1, s^2 = 1/2: hidden. In the second round 0 and 2, variance 1/2, s^2 = 2: told."""
    judge = own(tmp_path, rounds=True, ask_again=3)
    scored = await judge_group(judge, rated([0.0, 0.0]))
    await judge.close()
    assert [each.reward for each in scored] == [0, 2] and scored[0].again is not None and scored[0].again.rounds == 1
    with pytest.raises(UsageError, match="judge.noise.ask_again: judge 'function' has no extra votes"):
        own(tmp_path, rounds=False, ask_again=3)


async def test_files_scored_with_and_without_further_rounds_are_told_apart(tmp_path: Path) -> None:
    judges = [own(tmp_path, rounds=True, **noise) for noise in ({}, {"ask_again": 1}, {"ask_again": 2})]
    assert len({settings_of(judge) for judge in judges}) == 3
    judges[0].noise = None
    assert settings_of(judges[0]) == judges[0].settings != settings_of(judges[1])
    for judge in judges:
        await judge.close()


@pytest.mark.slow
def test_a_run_counts_the_groups_that_it_asked_again_and_what_they_took(tmp_path: Path) -> None:
    """A judge of pure noise, two votes: metrics match the scored lines and the calls."""
    with serving(Conduct(rule=lambda conversations: 0.5, noise=0.2)) as server:
        settings = [
            "train.steps=1",
            "eval=null",
            f"runs={tmp_path}",
            "judge=ruler",
            f"judge.api_base={server.api_base}",
        ]
        settings += ["judge.model=rule", "judge.cache=null", "judge.votes=2"]
        settings += ["judge.noise={ask_again: 1, min_reliability: 1}"]
        loaded = load_config(LETTERS / "config.yaml", settings)
        files = RunDir(asyncio.run(train(loaded)).root)
    [line] = files.metrics()
    asked = {row.group_id for row in files.scored(0) if row.again is not None}
    assert line.metrics["num_asked_again"] == len(asked) > 0
    assert line.metrics["judge_calls"] == 3 * 2 + len(asked) * 2
    assert 0 < line.metrics["judge_again_tokens"] < line.metrics["judge_tokens"]
    assert "judge_again_usd" not in line.metrics  # nobody knows the price of this model
