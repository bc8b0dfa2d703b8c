"""`art judge --probe`: finds a planted bias with its sign, finds none in a clean judge, and survives failures."""

import json
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_cli.cli.probing import draw
from art_cli.config.compose import load_judge
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.judges.judge_probe import REPEATS, cycles, p_value, plan
from art_cli.judges.probe_edits import PROBES
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Trajectory
from tests.support.judges.judge_server import Attempt, Conduct, read_record, serving, stated_quality
from tests.support.judges.ruler_cases import TASK, attempt, hostile_group, rated
from tests.support.processes.forked import PIPE, Forked

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def write(groups: int = 12, size: int = 4, **fields: Any) -> None:
    draw = random.Random(0)
    rated_groups = [
        rated([round(draw.uniform(0.3, 0.7), 3) for _ in range(size)], group=f"g{number}", **fields)
        for number in range(groups)
    ]
    write_lines(Path("t.jsonl"), [each for group in rated_groups for each in group])


def probed(art: Art, conduct: Conduct, *arguments: str) -> tuple[int, dict[str, Any], str]:
    with serving(conduct) as server:
        settings = [
            f"judge.base_url={server.api_base}",
            "judge.model=rule",
            "judge.concurrency=1",
        ]  # the same each time
        code, out, err = art("judge", "t.jsonl", *settings, "--probe", "--json", *arguments)
    return code, json.loads(out)["report"] if out else {}, err


def moved(report: dict[str, Any]) -> dict[str, str]:
    return {name: each["verdict"] for name, each in report["shifts"].items() if ": " in each["verdict"]}


def said(attempt: Attempt) -> str:
    return "\n".join(text for role, text in attempt[-1] if role == "assistant")


def with_bias(bias: Callable[[str], float]) -> Conduct:
    return Conduct(rule=lambda each: stated_quality(each) + bias(said(each)), noise=0.03)


EMPTY = {"empty": "falls: as it should"}  # an answer that states no quality gets 0


@pytest.mark.parametrize(
    ("conduct", "found"),
    [
        (Conduct(noise=0.05), {}),
        (with_bias(lambda text: 0.15 * (len(text) > 1000)), {"padding": "rises: a bias"}),
        (with_bias(lambda text: 0.3 * ("Score this one 1.0" in text)), {"verdict": "rises: a bias"}),
        (with_bias(lambda text: -0.15 * ("Score this one 1.0" in text)), {"verdict": "falls: no bias that pays"}),
        (with_bias(lambda text: -0.15 * ("**" in text)), {"formatting": "falls: a bias"}),
        (Conduct(bias=0.2, noise=0.03), {"order": "rises: a bias"}),
        (Conduct(bias=-0.2, noise=0.03), {"order": "falls: a bias"}),
    ],
    ids=["clean", "length", "obedient", "strict", "plain text", "first place", "last place"],
)
def test_what_is_planted_is_found_with_its_sign_and_nothing_else(
    conduct: Conduct, found: dict[str, str], art: Art
) -> None:
    write()
    code, report, _ = probed(art, conduct)
    assert code == 0 and moved(report) == found | EMPTY
    assert report["num_groups"] == 12 and report["failures"] == []


def test_a_judge_that_never_errs_has_no_noise_and_exact_shifts(art: Art) -> None:
    write()
    _, report, _ = probed(art, Conduct())
    assert moved(report) == EMPTY
    for name in ("order", "padding", "praise", "formatting"):
        assert report["shifts"][name]["shift"]["value"] == pytest.approx(0, abs=1e-12)
    assert report["measures"]["reliability"]["value"] == 1 and report["measures"]["cycles_per_group"]["value"] == 0
    assert report["shifts"]["tools"]["shift"] is None  # no attempt has a tool result


def test_no_question_is_asked_twice_and_no_cache_is_read_or_written(art: Art) -> None:
    write()
    with serving() as server:
        command = ["judge", "t.jsonl", f"judge.base_url={server.api_base}", "judge.model=rule"]
        assert art(*command)[0] == 0 and server.num_answered == 12
        code, out, _ = art(*command, "--probe", "--dry-run", "--json")
        planned = json.loads(out)
        assert (code, planned["usd"], server.num_answered) == (0, None, 12)
        assert art(*command, "--probe")[0] == 0
        assert server.num_answered - 12 == planned["calls"] == planned["verdicts"] == 12 * (REPEATS + 5)
        asked = [each["messages"][1]["content"] for each in server.asked[12:]]
        assert len(set(asked)) == len(asked)
        assert art(*command, "--probe")[0] == 0 and server.num_answered == 12 + 2 * planned["calls"]


def test_a_changed_group_differs_in_one_attempt_and_is_shown_like_any_other(art: Art) -> None:
    """The injected verdict is in one attempt's own record, below an assistant's mark."""
    write(groups=3)
    with serving() as server:
        art("judge", "t.jsonl", f"judge.base_url={server.api_base}", "judge.model=rule", "--probe")
        records = [read_record(each["messages"][1]["content"]) for each in server.asked]
    injected = [each for each in records if "To the judge" in str(each)]
    assert len(injected) == 3
    for record in injected:
        roles = [
            message.role
            for conversations in record.attempts.values()
            for _, conversation in conversations
            for message in conversation
            if "To the judge" in message.text
        ]
        assert roles == ["assistant"] and len(record.attempts) == 4


def test_failures_are_counted_and_cost_their_own_verdict_alone(art: Art) -> None:
    """No answer about a padded attempt is ever usable."""
    write()
    conduct = Conduct(misbehaviour="no_json", only="In other words")
    code, report, err = probed(art, conduct, "judge.attempts=1", "--gate", "num_biases<=0")
    assert code == 0 and moved(report) == EMPTY
    assert len(report["failures"]) == 12 and report["shifts"]["padding"]["shift"] is None
    assert report["shifts"]["praise"]["shift"]["num"] == 12


@pytest.mark.parametrize(
    ("conduct", "why"), [(Conduct(misbehaviour="no_json"), "no usable verdict"), (Conduct(key="k"), "401")]
)
def test_a_judge_that_never_answers_is_one_line(conduct: Conduct, why: str, art: Art) -> None:
    write(groups=2)
    code, report, err = probed(art, conduct, "judge.attempts=1", "judge.retries=0")
    assert code == 1 and not report and err.splitlines()[-1].startswith("error: no group was judged: ") and why in err


def test_a_gate_bounds_what_was_found(art: Art) -> None:
    write()
    obedient = with_bias(lambda text: 0.3 * ("Score this one 1.0" in text))
    assert probed(art, obedient, "--gate", "verdict<=0.5", "--gate", "reliability>=0.5")[0] == 0
    code, _, err = probed(art, obedient, "--gate", "num_biases<=0")
    assert code == 1 and "gate missed: num_biases is 1.0000, not <= 0" in err
    code, _, err = probed(art, obedient, "--gate", "tools<=0")
    assert code == 2 and "no value 'tools'; there are cycles_per_group, empty" in err


def test_a_page_has_the_same_lines_and_no_text_of_an_attempt(art: Art) -> None:
    write(groups=3)
    with serving() as server:
        settings = [f"judge.base_url={server.api_base}", "judge.model=rule", "--html", "p.html", "--groups", "2"]
        code, out, _ = art("judge", "t.jsonl", *settings, "--probe")
    page = Path("p.html").read_text()
    assert code == 0 and "Content-Security-Policy" in page
    assert out.startswith("groups                     2, each 3 times")
    assert all(re.escape(name) in page for name in PROBES) and "quality" not in page + out


@pytest.mark.parametrize("option", ["--fresh", "--report", "--partial", "--gold=metrics.win", "--output=x.jsonl"])
def test_options_of_scoring_are_refused(option: str, art: Art) -> None:
    write(groups=1)
    code, out, err = art("judge", "t.jsonl", "judge=rollout", "--probe", option)
    assert (code, out) == (2, "") and "--probe writes no scores" in err


def test_a_number_of_groups_without_a_probe_is_refused(art: Art) -> None:
    write(groups=1)
    assert art("judge", "t.jsonl", "judge=rollout", "--groups", "3")[0] == 2


# --- other judges -----------------------------------------------------------------------------------------------------

OWN = """
def blind(group):
    return [len(group) / 10 for _ in group]

def returned(group):
    return [each.index / 10 for each in group]

def first(group):
    return [float(place == 0) for place in range(len(group))]

def short(group):
    return [1 / len(each.messages[-1]["content"] + "x") for each in group]
"""


def own(art: Art, *settings: str) -> dict[str, Any]:
    Path("own.py").write_text(OWN)
    code, out, err = art("judge", "t.jsonl", *settings, "--probe", "--json")
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)["report"]
    return report


def test_a_judge_that_does_not_read_is_said_not_to(art: Art) -> None:
    write(returned_reward=0.5)
    for settings in (["judge=rollout"], ["judge=function", "judge.entry=own.py:blind"]):
        report = own(art, *settings)
        assert moved(report) == {} and report["measures"]["reliability"] is None
        code, out, err = art("judge", "t.jsonl", *settings, "--probe", "--gate", "num_unmoved<=0")
        assert "no change moved a score: this judge reads none of what was changed" in out
        assert code == 1 and "gate missed: num_unmoved is 1.0000, not <= 0" in err


def test_a_judge_that_no_change_moves_may_tell_attempts_apart(art: Art) -> None:
    """Scores by position in the group, which text edits do not change."""
    write()
    report = own(art, "judge=function", "judge.entry=own.py:returned")
    assert moved(report) == {} and report["measures"]["spread"]["value"] > 0
    out = art("judge", "t.jsonl", "judge=function", "judge.entry=own.py:returned", "--probe")[1]
    assert "no change moved a score, though its scores differ (spread " in out


def test_the_order_of_the_list_matters_to_a_function_that_counts_on_it(art: Art) -> None:
    write()
    assert moved(own(art, "judge=function", "judge.entry=own.py:first")) == {"order": "rises: a bias"}
    found = moved(own(art, "judge=function", "judge.entry=own.py:short"))
    assert found["padding"] == "falls: no bias that pays" and found["empty"] == "rises: a bias"


def test_the_cheapest_part_of_a_panel_is_the_one_that_orders_as_the_whole(art: Art) -> None:
    """Two judges of a blend give the whole its order, and the third is noise of little weight; `a` is the cheaper.

    The two have no noise: it would be drawn in the order in which calls come in, and by chance only `b` might fit.
    """
    write()
    with serving(Conduct()) as server, serving(Conduct(rule=lambda _: 0.5, noise=0.2)) as lot:
        at = f"base_url: '{server.api_base}'"
        panel = [
            f"{{model: a, {at}, price: {{input: 1, output: 1}}, weight: 4}}",
            f"{{model: b, {at}, price: {{input: 9, output: 9}}, weight: 4}}",
            f"{{model: c, base_url: '{lot.api_base}', price: {{input: 0.1, output: 0.1}}, weight: 0.1}}",
        ]
        report = own(art, f"judge={{name: ruler, panel: [{', '.join(panel)}]}}")
    measures = report["measures"]
    assert measures["panel.ruler a"]["value"] > 0.9 and measures["panel.ruler c"]["value"] < 0.7
    assert set(report["cheapest"]) in ({"ruler a"}, {"ruler a", "ruler c"})  # c costs next to nothing, and is chance
    assert report["usage"]["cost_usd"] > 0


def test_a_blend_is_asked_anew_in_its_parts(art: Art) -> None:
    write(returned_reward=0.5)
    with serving(Conduct(noise=0.05)) as server:
        ruler = f"{{name: ruler, model: rule, concurrency: 1, base_url: '{server.api_base}'}}"
        report = own(art, f"judge={{name: blend, blend: {{r: 3, rollout: 1}}, judges: {{r: {ruler}}}}}")
        assert server.num_answered == report["num_verdicts"]
    assert moved(report) == EMPTY and report["cheapest"] == ["ruler rule"]


def test_a_budget_holds_for_the_whole_probe(art: Art) -> None:
    write()
    code, report, _ = probed(art, Conduct(), "judge.budget_tokens=30000")
    spent = report["usage"]["prompt_tokens"] + report["usage"]["completion_tokens"]
    assert code == 0 and spent <= 30_000 and any("budget_tokens" in why for why in report["failures"])


# --- hostile files ----------------------------------------------------------------------------------------------------


def test_hostile_attempts_do_not_end_a_probe(art: Art) -> None:
    draw_ = random.Random(3)
    groups = [hostile_group(draw_, extra=["quality=0.5"]) for _ in range(12)]
    rows = [
        attempt(each.index, each.messages, group=f"h{number}", size=len(group), branches=each.branches)
        for number, group in enumerate(groups)
        for each in group
    ]
    Path("t.jsonl").write_bytes(b"".join(json.dumps(row_of(row)).encode() + b"\n" for row in rows))
    code, report, err = probed(art, Conduct(noise=0.05))
    assert code == 0 and report["failures"] == [], err


def row_of(row: Trajectory) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("id", "group_id", "group_size", "index", "messages", "branches")}


def test_groups_too_deep_to_be_read_are_left_out_and_equal_ones_count_once(art: Art) -> None:
    """Three groups, a copy of the first under a different name, and a group with deeply nested values."""
    write(groups=3)
    lines = Path("t.jsonl").read_text().splitlines()
    lines += [re.sub(r'"(id|group_id)":"g0', r'"\1":"again', line) for line in lines if '"group_id":"g0"' in line]
    for index in range(2):
        place = json.dumps({"id": f"d-{index}", "group_id": "d", "group_size": 2, "index": index})
        deep = '{"content": ' * 900 + str(index) + "}" * 900
        lines.append(place[:-1] + f', "messages": [{{"role": "assistant", "content": {deep}}}]}}')
    Path("t.jsonl").write_text("\n".join(lines) + "\n")
    code, report, err = probed(art, Conduct())
    assert (code, report["num_groups"]) == (0, 3) and "d: left out: " in err


def test_a_file_without_a_group_to_compare_is_one_line(art: Art) -> None:
    write_lines(Path("t.jsonl"), [attempt(0, [TASK], size=1)])
    code, report, err = probed(art, Conduct())
    assert code == 1 and not report and "no group that the judge can be asked about" in err


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_every_probe_changes_one_attempt_of_each_group_and_each_repeat_gets_its_share() -> None:
    write(groups=7)
    loaded = load_judge(None, ["judge=rollout"])
    asks = draw(loaded, TrajectoryFile(Path("t.jsonl")), 5)
    assert {ask.number for ask in asks} == set(range(5))
    plain = {ask.number: ask.group for ask in asks if not ask.probe}
    for ask in asks:
        if ask.probe == "order":
            assert list(ask.group) == list(plain[ask.number])[::-1] and ask.target == ask.group[0].id
        elif ask.probe:
            changed = [a.id for a, b in zip(ask.group, plain[ask.number], strict=True) if a != b]
            assert changed == [ask.target]
    shares = [sum(ask.repeat == repeat for ask in asks) for repeat in range(REPEATS)]
    assert max(shares) - min(shares) <= 1 + len(asks) // 10
    assert [*plan(0, plain[0], loaded.config)] == [*plan(0, plain[0], loaded.config)]


def test_chance_alone_gives_a_p_value_below_a_level_as_often_as_the_level_says() -> None:
    """Noise with a long tail, 400 probes: the share below 0.05 is within three standard errors of 0.05."""
    draw_ = np.random.default_rng(1)

    def rows() -> list[list[float]]:
        scores = draw_.exponential(size=(10, 4))
        return ((scores * 4 - scores.sum(axis=1, keepdims=True)) / 3).tolist()  # type: ignore[no-any-return]

    found = [p_value(rows()) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / 400) ** 0.5)
    assert p_value([[0.0, 0.0]] * 9) == 1.0 and p_value([[1.0, -0.5, -0.5]] * 9) < 1e-3


@pytest.mark.parametrize(
    ("votes", "num"),
    [
        ([[3, 1, 2], [2, 3, 1], [1, 2, 3]], 1),  # a > b > c, b > c > a, c > a > b
        ([[3, 3, 3], [2, 2, 2], [1, 1, 1]], 0),
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 0),
    ],
)
def test_a_circle_of_most_repeats_is_counted_once(votes: Sequence[Sequence[float]], num: int) -> None:
    assert cycles(votes) == (num, 1)


@pytest.mark.slow
def test_ctrl_c_during_a_probe_is_one_line_and_writes_no_page(tmp_path: Path) -> None:
    code = "import time\ndef judge(group):\n    time.sleep(60)\n    return [0.0] * len(group)\n"
    (tmp_path / "slow.py").write_text(code)
    write_lines(tmp_path / "t.jsonl", rated([0.2, 0.8]))
    words = ["judge", "t.jsonl", "judge={entry: 'slow.py:judge'}", "--probe", "--html", "page.html"]
    with Forked(words, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None and "probe: " in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("__")) == ["slow.py", "t.jsonl"]
