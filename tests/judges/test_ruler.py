"""RULER against a real HTTP judge that scores by a known rule and misbehaves on demand."""

import asyncio
import itertools
import json
import random
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_cli.config.schema import PriceConfig, RulerJudgeConfig
from art_cli.judges import agreement
from art_cli.judges.costs import BudgetSpent, CostEstimate, Usage
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.judges.ruler.ruler_judge import RulerJudge, vote_key
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError
from tests.support.judges.judge_server import (
    HTTP_MISBEHAVIOURS,
    MISBEHAVIOURS,
    VALID,
    Conduct,
    JudgeServer,
    read_record,
)
from tests.support.judges.ruler_cases import SYSTEM, TASK, attempt, rated

QUALITIES = [0.2, 0.9, 0.55, 0.0]


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer() as running:
        yield running


def make(server: JudgeServer, *, directory: Path = Path("."), job: str = "", **settings: Any) -> RulerJudge:
    given = {"model": "rule", "api_base": server.api_base, "cache": None, "timeout_s": 5.0} | settings
    return RulerJudge(RulerJudgeConfig(name="ruler", **given), directory, job=job, first_delay_s=0.001)


async def score(judge: RulerJudge, group: list[Trajectory]) -> dict[str, float]:
    try:
        return {name: verdict.reward for name, verdict in (await judge.judge(group)).items()}
    finally:
        await judge.close()


def own_scores(qualities: list[float] = QUALITIES) -> dict[str, float]:
    return {f"g-{index}": quality for index, quality in enumerate(qualities)}


# --- right scores or owed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("misbehaviour", sorted([*MISBEHAVIOURS, *HTTP_MISBEHAVIOURS]))
async def test_a_misbehaviour_that_passes_gives_the_right_scores(server: JudgeServer, misbehaviour: str) -> None:
    server.conduct = Conduct(misbehaviour=misbehaviour, times=1)
    timeout_s = 0.2 if misbehaviour == "hang" else 5.0
    assert await score(make(server, timeout_s=timeout_s), rated(QUALITIES)) == own_scores()


@pytest.mark.parametrize("misbehaviour", sorted({*MISBEHAVIOURS, *HTTP_MISBEHAVIOURS} - VALID))
async def test_a_misbehaviour_that_stays_leaves_the_group_owed(server: JudgeServer, misbehaviour: str) -> None:
    server.conduct = Conduct(misbehaviour=misbehaviour)
    timeout_s = 0.05 if misbehaviour == "hang" else 5.0
    with pytest.raises(JudgeError) as owed:
        await score(make(server, retries=2, timeout_s=timeout_s), rated(QUALITIES))
    assert "\n" not in str(owed.value) and str(owed.value).startswith("rule")


async def test_a_judge_on_another_scale_is_told_so_at_its_third_answer(server: JudgeServer) -> None:
    """Scores of 20, 90, 55 and 0: three answers, over two groups. An occasional correct answer resets the count."""
    server.conduct = Conduct(misbehaviour="percent")
    with pytest.raises(JudgeStopped, match="last 3 answers are on another scale, with scores up to 90 and not 1"):
        await score(make(server), rated(QUALITIES))
    assert len(server.asked) == 3
    server.conduct = Conduct(misbehaviour="percent", times=2)
    assert await score(make(server), rated(QUALITIES)) == own_scores()


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        ({"content": None, "refusal": "I cannot\nrate this."}, "stop", "I cannot rate this."),
        ({"content": None}, "content_filter", "content_filter"),
    ],
)
async def test_a_refusal_is_named_as_one(server: JudgeServer, message: Json, reason: str, words: str) -> None:
    """OpenAI's field for it, and a filter's finish reason."""

    def refuse(body: bytes) -> bytes:
        return json.dumps({**json.loads(body), "choices": [{"message": message, "finish_reason": reason}]}).encode()

    server.conduct = Conduct(change_body=refuse)
    with pytest.raises(JudgeError, match=f"the model refuses to answer: {words}$"):
        await score(make(server, attempts=1), rated([0.2]))


async def test_every_trajectory_gets_its_own_score_whatever_the_order_and_the_votes(server: JudgeServer) -> None:
    """60 groups of 1 to 12 in shuffled order, answered out of order, each with 1 to 4 votes in orders of their own."""
    rng = random.Random(0)
    server.conduct = Conduct(misbehaviour="out_of_order")
    for _ in range(60):
        group = rated([round(rng.random(), 3) for _ in range(rng.randint(1, 12))])
        wanted = {each.id: float(each.messages[-1]["content"].partition("quality=")[2]) for each in group}
        rng.shuffle(group)
        found = await score(make(server, votes=rng.randint(1, 4), seed=rng.randrange(99)), group)
        assert found == pytest.approx(wanted, abs=1e-12)


async def test_the_files_order_and_the_ids_change_nothing_that_is_asked(server: JudgeServer) -> None:
    """24 orders under 24 group ids: one question, paid for once."""
    judge = make(server)
    for number, order in enumerate(itertools.permutations(rated(QUALITIES))):
        renamed = [attempt(index, each.messages, group=f"other{number}") for index, each in enumerate(order)]
        await judge.judge(renamed)
    await judge.close()
    assert len(server.asked) == 1 and judge.num_cached == 23


async def test_after_a_reseed_the_same_group_is_asked_about_again(server: JudgeServer) -> None:
    judge = make(server)
    for _ in range(2):
        await judge.judge(rated(QUALITIES))
        judge.reseed()
    await judge.close()
    assert len(server.asked) == 2 and judge.num_cached == 0


async def test_identical_attempts_are_shown_once_and_get_one_score(server: JudgeServer) -> None:
    found = await score(make(server), rated([0.3, 0.7, 0.3, 0.3]))
    assert found == own_scores([0.3, 0.7, 0.3, 0.3])
    assert len(read_record(server.asked[0]["messages"][1]["content"]).attempts) == 2


async def test_an_unusable_answer_is_sent_back_once_with_what_is_wrong_then_asked_anew(server: JudgeServer) -> None:
    """Calls 1 and 2 are one question and its answer sent back; 3 and 4 the next, the same order under other ids."""
    server.conduct = Conduct(misbehaviour="seven", times=3)
    assert await score(make(server), rated(QUALITIES)) == own_scores()
    conversations = [asked["messages"] for asked in server.asked]
    assert [len(messages) for messages in conversations] == [2, 4, 2, 4]
    assert "is 7, not between 0 and 1" in conversations[1][3]["content"]
    assert '"score": 7' in conversations[1][2]["content"]
    first, anew = (read_record(conversations[place][1]["content"]) for place in (0, 2))
    assert first.asked != anew.asked
    texts = [[conversation[-1].text for [(_, conversation)] in record.attempts.values()] for record in (first, anew)]
    assert texts[0] == texts[1]


# --- votes, panels, large groups --------------------------------------------------------------------------------------


async def test_votes_are_kept_with_their_places_and_spread(server: JudgeServer) -> None:
    """Bias 0.2, group of 2: first place +0.1, last -0.1. Two votes: 0.5 +- 0.1, spread sqrt(2 * 0.1^2 / 1)."""
    server.conduct = Conduct(bias=0.2)
    judge = make(server, votes=2)
    verdicts = await judge.judge(rated([0.4, 0.6]))
    await judge.close()
    for name, quality in (("g-0", 0.4), ("g-1", 0.6)):
        [given] = verdicts[name].scores
        assert verdicts[name].reward == given.score == pytest.approx(quality)
        assert sorted(given.positions) == [0, 1]
        by_place = [vote for _, vote in sorted(zip(given.positions, given.votes, strict=True))]
        assert by_place == pytest.approx([quality + 0.1, quality - 0.1])
        assert given.spread == pytest.approx((2 * 0.1**2) ** 0.5)


async def test_the_models_that_the_replies_name_are_in_each_score_and_in_the_cache(
    server: JudgeServer, tmp_path: Path
) -> None:
    """Two votes, of which the second comes from another model, whose name has a newline."""
    server.conduct = Conduct(models=["rule-1", "rule-2\n2026"])
    for num_asked in (2, 2):  # the second time both votes are in the cache
        judge = make(server, votes=2, cache=tmp_path / "votes.sqlite")
        verdicts = await judge.judge(rated([0.4, 0.6]))
        await judge.close()
        [score] = verdicts["g-0"].scores
        assert (score.model, score.model_returned) == ("rule", "rule-1, rule-2_2026")
        assert len(server.asked) == num_asked


async def test_a_panel_takes_the_weighted_mean_and_keeps_each_models_score(server: JudgeServer) -> None:
    """Weights 3 and 1, the second model sees quality q as 1 - q: reward = 0.75 q + 0.25 (1 - q)."""
    async with JudgeServer(Conduct(rule=lambda conversations: 1 - server.conduct.rule(conversations))) as contrary:
        panel = [
            {"model": "honest", "api_base": server.api_base, "weight": 3.0},
            {"model": "contrary", "api_base": contrary.api_base, "weight": 1.0},
        ]
        judge = RulerJudge(RulerJudgeConfig(name="ruler", panel=panel, cache=None), Path("."))
        verdicts = await judge.judge(rated(QUALITIES))
        await judge.close()
    for index, quality in enumerate(QUALITIES):
        verdict = verdicts[f"g-{index}"]
        assert verdict.reward == pytest.approx(0.75 * quality + 0.25 * (1 - quality))
        assert [(each.model, each.score) for each in verdict.scores] == [
            ("honest", pytest.approx(quality)),
            ("contrary", pytest.approx(1 - quality)),
        ]


async def test_a_group_too_large_for_one_call_is_put_on_one_scale(server: JudgeServer) -> None:
    """40 attempts, 8 a call, and a judge that only compares: it stretches each call's scores from 0 to 1.

    A call's own best is 1 whatever it is worth: parts of 8 side by side reach a tau of 0.80 to 0.92 with the truth
    (5 seeds), through the anchors 0.997 to 1.
    """
    rng = random.Random(1)
    qualities = [round(rng.random(), 3) for _ in range(40)]
    server.conduct = Conduct(relative=True)
    found = await score(make(server, max_group=8), rated(qualities))
    scores = [found[f"g-{index}"] for index in range(40)]
    assert all(0 <= each <= 1 for each in scores)
    tau = agreement.kendall_tau(scores, qualities).numerator
    assert tau > 0.98
    sizes = [len(read_record(asked["messages"][1]["content"]).attempts) for asked in server.asked]
    assert sizes[0] == 8 and len(sizes) == 7 and max(sizes) <= 8  # (40 - 8) / (8 - 2 anchors) = 6 more calls


# --- patience ---------------------------------------------------------------------------------------------------------


async def test_a_rate_limit_is_waited_out_by_every_call_not_only_the_one_that_was_told(server: JudgeServer) -> None:
    """One 429 asks for 0.3 s. With one place for calls, no request may arrive in the 0.3 s after it."""
    server.conduct = Conduct(misbehaviour="429", times=1, retry_after="0.3")
    judge = make(server, concurrency=1)
    await asyncio.gather(*(judge.judge(rated(QUALITIES, group=f"g{i}")) for i in range(4)))
    await judge.close()
    assert len(server.arrived) == 5
    assert server.arrived[1] - server.arrived[0] >= 0.29


async def test_a_judge_that_asks_for_an_hours_quiet_is_not_waited_for(server: JudgeServer) -> None:
    server.conduct = Conduct(misbehaviour="429", retry_after="3600")
    with pytest.raises(JudgeError, match="429"):
        await score(make(server), rated(QUALITIES))


async def test_calls_at_once_are_limited(server: JudgeServer) -> None:
    """20 groups, 4 places, 20 ms each: at least 5 rounds."""
    server.conduct = Conduct(delay_s=0.02)
    judge = make(server, concurrency=4)
    started = time.monotonic()
    await asyncio.gather(*(judge.judge(rated(QUALITIES, group=f"g{i}")) for i in range(20)))
    await judge.close()
    assert time.monotonic() - started >= 5 * 0.02


async def test_a_judge_that_hangs_is_given_up_after_three_deadlines(server: JudgeServer) -> None:
    server.conduct = Conduct(misbehaviour="hang")
    with pytest.raises(JudgeError, match=r"did not answer within 0.05 s \(3 tries\)"):
        await score(make(server, timeout_s=0.05, retries=6), rated(QUALITIES))


async def test_a_wrong_key_stops_the_judge_at_once(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-key-0001")
    server.conduct = Conduct(key="right")
    with pytest.raises(JudgeStopped, match="401") as stopped:
        await score(make(server), rated(QUALITIES))
    assert len(server.asked) == 1
    assert "sk-wrong-key-0001" not in str(stopped.value)  # which the server quotes in its answer


async def test_a_judge_that_is_not_there_stops_the_run() -> None:
    async with JudgeServer() as server:
        judge = make(server, retries=1)
    with pytest.raises(JudgeStopped, match="cannot be reached"):
        await score(judge, rated(QUALITIES))


async def test_a_model_without_json_schemas_is_asked_without_one_from_then_on(server: JudgeServer) -> None:
    server.conduct = Conduct(takes_schema=False)
    judge = make(server)
    for name in ("a", "b"):
        await judge.judge(rated(QUALITIES, group=name))
    await judge.close()
    assert ["response_format" in asked for asked in server.asked] == [True, False, False]


async def test_the_schema_names_every_id_and_parameters_are_passed_on(server: JudgeServer) -> None:
    await score(make(server, params={"temperature": 0, "reasoning_effort": "low"}), rated(QUALITIES))
    [asked] = server.asked
    assert asked["temperature"] == 0 and asked["reasoning_effort"] == "low" and asked["model"] == "rule"
    entry = asked["response_format"]["json_schema"]["schema"]["properties"]["scores"]["items"]
    assert sorted(entry["properties"]["id"]["enum"]) == sorted(read_record(asked["messages"][1]["content"]).asked)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "9s"}, 0.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m3s"}, 63.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "soon"}, 0.0),
    ],
)
def test_a_used_up_limit_asks_for_quiet_until_it_is_reset(headers: dict[str, str], seconds: float) -> None:
    assert quiet_time(headers) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, None), ({"retry-after": "2"}, 2.0), ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
     ({"retry-after": "inf"}, None)],
)  # fmt: skip
def test_a_retry_after_is_read_in_seconds_or_milliseconds(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


# --- cost -------------------------------------------------------------------------------------------------------------


async def test_a_verdict_paid_for_is_not_paid_for_again(server: JudgeServer, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "verdicts.sqlite"
    first = await score(make(server, cache=cache, votes=2), rated(QUALITIES))
    again = await score(make(server, cache=cache, votes=2), rated(QUALITIES))
    assert again == first
    assert len(server.asked) == 2
    await score(make(server, cache=cache, votes=3), rated(QUALITIES))
    assert len(server.asked) == 3  # the third vote only


async def test_groups_of_the_same_content_at_once_are_paid_for_once(server: JudgeServer) -> None:
    server.conduct = Conduct(delay_s=0.02)
    judge = make(server)
    same = [rated(QUALITIES) for _ in range(5)]
    verdicts = await asyncio.gather(*map(judge.judge, same))
    await judge.close()
    assert all(each == verdicts[0] for each in verdicts) and len(server.asked) == 1


@pytest.mark.parametrize(
    "changed", [{"model": "other"}, {"params": {"temperature": 0}}, {"seed": 1}, {"rubric": Path("r.txt")}]
)
async def test_what_decides_a_verdict_is_in_its_key(
    server: JudgeServer, tmp_path: Path, changed: dict[str, Any]
) -> None:
    (tmp_path / "r.txt").write_text("Shorter is better.")
    cache = tmp_path / "verdicts.sqlite"
    await score(make(server, cache=cache), rated(QUALITIES))
    await score(make(server, cache=cache, directory=tmp_path, **changed), rated(QUALITIES))
    assert len(server.asked) == 2


async def test_usage_of_answers_that_could_not_be_used_is_kept(server: JudgeServer, tmp_path: Path) -> None:
    """Three unusable answers, then a good one: all four in the ledger and in the scores' cost."""
    server.conduct = Conduct(misbehaviour="empty", times=3)
    price = PriceConfig(input=1.0, output=2.0)
    judge = make(server, cache=tmp_path / "v.sqlite", job="j", price=price)
    verdicts = await judge.judge(rated(QUALITIES))
    usage = judge.usage
    assert usage.calls == 4
    assert usage.cost_usd == pytest.approx((usage.prompt_tokens * 1.0 + usage.completion_tokens * 2.0) / 1e6)
    assert sum(verdict.scores[0].cost_usd or 0 for verdict in verdicts.values()) == pytest.approx(usage.cost_usd)
    assert judge.cache.spent("j").tokens == usage.tokens
    await judge.close()
    rows = sqlite3.connect(tmp_path / "v.sqlite").execute("select outcome from calls order by rowid").fetchall()
    assert [outcome for (outcome,) in rows] == [*["the answer is empty"] * 3, "verdict"]


async def test_a_group_that_stays_owed_has_its_calls_in_the_ledger(server: JudgeServer, tmp_path: Path) -> None:
    server.conduct = Conduct(misbehaviour="nan")
    judge = make(server, cache=tmp_path / "v.sqlite", job="j", attempts=2)
    with pytest.raises(JudgeError):
        await judge.judge(rated(QUALITIES))
    assert judge.usage.calls == 4 and judge.cache.spent("j").tokens == judge.usage.tokens > 0
    await judge.close()


async def test_a_budget_of_tokens_stops_before_it_is_exceeded_and_counts_earlier_processes(
    server: JudgeServer, tmp_path: Path
) -> None:
    """20 concurrent groups with budget for some; a second process of the job gets only the remaining budget."""
    server.conduct = Conduct(delay_s=0.01)
    settings = {"cache": tmp_path / "v.sqlite", "job": "j", "budget_tokens": 9000}
    scored = 0
    for name in ("first", "second"):
        judge = make(server, **settings)
        waits = [judge.judge(rated(QUALITIES, group=f"{name}{i}")) for i in range(20)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        spent = judge.cache.spent("j").tokens
        await judge.close()
        assert all(isinstance(result, BudgetSpent | dict) for result in results)
        new = sum(isinstance(result, dict) for result in results)
        assert new > 0 or name == "second"
        scored += new
        assert spent <= 9000
    assert 0 < scored < 40


async def test_a_model_that_thinks_for_long_keeps_to_the_budget(server: JudgeServer) -> None:
    """Each call uses 5,000 reasoning tokens, unknown before the first answer."""
    server.conduct = Conduct(delay_s=0.01, usage={"prompt_tokens": 100, "completion_tokens": 5000})
    judge = make(server, budget_tokens=20_000)
    waits = [judge.judge(rated(QUALITIES, group=str(i))) for i in range(20)]
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert 0 < sum(isinstance(result, dict) for result in results) <= 4 and judge.usage.tokens <= 20_400
    await judge.close()


async def test_verdicts_of_another_server_are_not_taken_for_those_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt: Any = SimpleNamespace(messages=[{"role": "user", "content": "which?"}])
    member = RulerJudgeConfig(name="ruler", model="openai/gpt-6.1-sol")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    keys = {vote_key(member, prompt)}
    for address in ("https://api.openai.com/v1", "http://a/v1", "http://b/v1"):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        keys.add(vote_key(member, prompt))
    assert len(keys) == 3


async def test_a_budget_in_dollars_needs_a_price(server: JudgeServer) -> None:
    with pytest.raises(UsageError, match="no price is known for rule"):
        make(server, budget_usd=1.0)
    judge = make(server, budget_usd=1e-9, price=PriceConfig(input=1, output=1))
    with pytest.raises(BudgetSpent, match="judge.budget_usd"):
        await score(judge, rated(QUALITIES))
    assert server.asked == []


async def test_the_estimate_before_is_near_what_is_paid_after(server: JudgeServer) -> None:
    """Prompt tokens within 2 %, calls exactly."""
    judge = make(server, votes=2, max_group=4, price=PriceConfig(input=1.0, output=0.0))
    group = rated([index / 10 for index in range(10)])
    before = judge.estimate(group)
    await judge.judge(group)
    assert before.calls == judge.usage.calls == 8  # parts of 4, 4, 4, 4 (2 anchors), two votes each
    assert before.prompt_tokens == pytest.approx(judge.usage.prompt_tokens, rel=0.02)
    assert before.usd == pytest.approx(judge.usage.cost_usd, rel=0.02)
    assert judge.estimate(group[:0]) == CostEstimate()
    await judge.close()


async def test_a_cache_that_is_no_database_is_one_line(tmp_path: Path, server: JudgeServer) -> None:
    (tmp_path / "v.sqlite").write_text("not a database " * 100)
    with pytest.raises(UsageError, match=r"judge.cache: .*v\.sqlite"):
        make(server, cache=tmp_path / "v.sqlite")


# --- what it is told --------------------------------------------------------------------------------------------------


async def test_the_rubric_is_a_text_file_and_so_are_the_instructions(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Shorter is better.")
    (tmp_path / "all.txt").write_text("Judge.\n{rubric}\nAnswer in JSON.")
    await score(make(server, directory=tmp_path, rubric=Path("rubric.txt")), rated(QUALITIES))
    both = {"rubric": Path("rubric.txt"), "instructions": Path("all.txt")}
    await score(make(server, directory=tmp_path, **both), rated(QUALITIES))
    systems = [asked["messages"][0]["content"] for asked in server.asked]
    assert "Shorter is better." in systems[0] and "outweighs everything else" not in systems[0]
    assert systems[1] == "Judge.\nShorter is better.\nAnswer in JSON."


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), (" \n", "the file is empty")])
async def test_an_unreadable_rubric_is_one_line(
    server: JudgeServer, tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "r.txt").write_text(text)
    with pytest.raises(UsageError, match=rf"judge.rubric: .*r\.txt: {says}"):
        make(server, directory=tmp_path, rubric=Path("r.txt"))


async def test_an_empty_group_asks_nothing(server: JudgeServer) -> None:
    assert await score(make(server), []) == {}
    assert server.asked == []


async def test_every_attempt_is_seen_whole_sub_agents_included(server: JudgeServer) -> None:
    """The quality is stated by a helper only; the judge still finds it."""
    helper = [SYSTEM, {"role": "assistant", "content": "quality=0.4"}]
    group = [
        attempt(0, [SYSTEM, TASK], branches=[helper]),
        attempt(1, [SYSTEM, TASK, {"role": "user", "content": "x"}]),
    ]
    assert await score(make(server), group) == {"g-0": 0.4, "g-1": 0.0}


def test_usage_adds_up_and_an_unknown_price_stays_unknown() -> None:
    known, unknown = Usage(1, 2, 3, 0.5, 1.0), Usage(1, 2, 3, None, 1.0)
    assert known + known == Usage(2, 4, 6, 1.0, 2.0)
    assert (known + unknown).cost_usd is None
