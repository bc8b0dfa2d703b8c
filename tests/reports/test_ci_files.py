"""CI files from `art eval` and `art report`: readable for any names and errors."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from art_cli.reports.pages.ci_files import MAX_ROWS, Case, eval_cases, eval_markdown, junit, report_cases
from tests.support.paths import LETTERS
from tests.support.records.runs import write_run

Art = Callable[..., tuple[int, str, str]]
HOSTILE = ["<img src=x onerror=a()>", "a|b\\|c`d``e", "@everyone #1 [x](http://a)", "\x00\x1b[2J\ud800\ufffe", "]]>",
           "", "a\n\n# b\r\n| c |", "&lt;&#124;", "**b** _i_ ~~s~~", "runs/" + "x" * 300 + "/last"]  # fmt: skip
texts = st.one_of(st.sampled_from(HOSTILE), st.text(), st.text("<>&|`\\@[]()#*_~\n\r\x00 ab", max_size=30))


def whole(names: list[str], *, gate: str = "reward>=0.8", error: str = "", fault: str = "") -> dict[str, Any]:
    value = {"mean": 0.75, "low": 0.5, "high": None if gate == "" else 1.0, "num": 8}
    value |= {"low": None} if value["high"] is None else {}
    return {
        "schema_version": 1,
        "policies": [{"name": name, "digest": "ab" * 32, "fault": fault} for name in names],
        "metrics": [{"policy": name, "metric": gate, **value, "difference": value} for name in names],
        "gates": [{"gate": gate, "holds": not error, "value": value, "error": error}],
    }


def rendered(markdown: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<page>{MarkdownIt('gfm-like', {'linkify': False}).render(markdown)}</page>")


@given(names=st.lists(texts, min_size=1, max_size=3), gate=texts, error=texts, fault=texts)
def test_no_name_changes_the_shape_of_the_summary(names: list[str], gate: str, error: str, fault: str) -> None:
    """Each name and error stays inside `code`, where nothing is a mention, a link or markup."""
    page = rendered(eval_markdown(whole(names, gate=gate, error=error, fault=fault), link="https://a/b|(c)<d>"))
    tags = {each.tag for each in page.iter()}
    assert tags <= {"page", "h3", "table", "thead", "tbody", "tr", "th", "td", "code", "strong", "ul", "li", "p", "a"}
    assert [len(table.findall("tbody/tr")) for table in page.findall("table")] == [1, len(names)]
    assert all(len(row) in (3, 5) for row in page.iter("tr"))
    assert [each.get("href") for each in page.iter("a")] == ["https://a/b%7C%28c%29%3Cd%3E"]
    for each in page.iter("code"):
        assert each.text is None or "\n" not in each.text


def test_a_name_is_read_in_the_summary_as_it_is() -> None:
    for name in ("runs/mine", "a|b\\|c`d", "<b>&amp;</b>"):
        page = rendered(eval_markdown(whole([name])))
        assert name in [each.text for each in page.iter("code")]


def test_a_summary_of_a_large_sweep_fits_into_a_comment() -> None:
    text = eval_markdown(whole([f"runs/{'`' * 300}{number}" for number in range(500)]) | {"policies": []})
    assert f"and {500 - MAX_ROWS} more rows" in text and len(text) < 2**16


@given(suite=st.sampled_from(["art eval"]), cases=st.lists(st.builds(Case, texts, texts, texts)), name=texts)
def test_any_name_or_error_is_well_formed_xml_with_a_test_for_each_case(
    suite: str, cases: list[Case], name: str
) -> None:
    root = ElementTree.fromstring(junit(suite, cases, {name: "ab"}))
    [parent] = root
    tests = parent.findall("testcase")
    assert (root.tag, parent.tag, len(tests)) == ("testsuites", "testsuite", len(cases))
    failed = [bool(case.failure) for case in cases]
    assert [test.find("failure") is not None for test in tests] == failed
    for each in (root, parent):
        assert (each.get("tests"), each.get("failures")) == (str(len(cases)), str(sum(failed)))
    assert all({"classname", "name", "time"} <= set(test.keys()) for test in tests)
    assert [each.get("value") for each in parent.iter("property")] == ["ab"]


def test_plain_names_are_read_back_from_the_xml_as_they_are() -> None:
    root = ElementTree.fromstring(junit("art eval", eval_cases(whole(["a", "runs/<é>"], error="gate missed: &")), {}))
    found = [(test.get("classname"), test.get("name")) for test in root.iter("testcase")]
    assert found == [("a", "attempts"), ("runs/<é>", "attempts"), ("runs/<é>", "reward>=0.8")]
    assert [failure.text for failure in root.iter("failure")] == ["gate missed: &"]


def test_a_report_fails_its_test_where_the_command_fails() -> None:
    assert report_cases({"run": "r", "fault": "every attempt failed"})[0].failure
    assert not report_cases({"run": "r", "fault": ""})[0].failure


def test_a_report_shows_each_evaluation_with_its_difference_to_the_first(art: Art, tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", collapses_at=17).root
    files = [tmp_path / name for name in ("report.xml", "report.md")]
    code, out, _ = art("report", run, "--json", "--junit", files[0], "--markdown", files[1], "--link", "https://ci/7")
    report = json.loads(out)
    [case] = ElementTree.parse(files[0]).getroot().iter("testcase")
    assert (code, case.get("classname"), len(case)) == (0, str(run), 0)
    text = files[1].read_text()
    page = rendered(text)
    rows = [[cell.text or "" for cell in row] for row in page.iter("tr")][1:]
    assert [row[0] for row in rows] == [str(each["step"]) for each in report["evaluations"]]
    first, *others = report["evaluations"]
    assert first["difference"] is None and rows[0][2] == ""
    for row, each in zip(rows[1:], others, strict=True):
        difference = each["difference"]
        assert difference["mean"] == pytest.approx(each["reward"]["mean"] - first["reward"]["mean"])
        assert row[2] == f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    assert "evaluation fell" in text and text.endswith("[The whole page](https://ci/7)\n")


@pytest.mark.slow
def test_eval_writes_verdicts_digests_and_the_same_intervals_as_the_report(art: Art, tmp_path: Path) -> None:
    """A run of three steps: gate 1 holds; all missed gates are named in the error."""
    config, runs = LETTERS / "config.yaml", f"runs={tmp_path}"
    assert art("train", config, runs, "train.steps=2", "eval.every=2")[0] == 0
    run = tmp_path / "letters"
    files = [tmp_path / name for name in ("eval.xml", "eval.md")]
    gates = ["reward.low>=-9", "reward>=2", "reward.low>=baseline+1"]
    words = [word for gate in gates for word in ("--gate", gate)]
    named = ["--checkpoint", "base", "--checkpoint", run]
    code, out, err = art("eval", config, runs, *named, *words, "--json", "--junit", files[0], "--markdown", files[1])
    found = json.loads(out)
    assert code == 1 and "reward is" in err and "its low end not >= +1" in err.splitlines()[-1]
    assert found["schema_version"] == 1 and [each["holds"] for each in found["gates"]] == [True, False, False]
    assert [each["name"] for each in found["policies"]] == ["base", str(run)]
    report = json.loads(art("report", run, "--json")[1])
    digest = found["policies"][1]["digest"]
    assert re.fullmatch("[0-9a-f]{64}", digest) and digest in {report[name]["digest"] for name in ("best", "last")}
    root = ElementTree.parse(files[0]).getroot()
    assert (root.get("tests"), root.get("failures")) == ("5", "2")
    assert digest in [each.get("value") for each in root.iter("property")]
    page = rendered(files[1].read_text())
    assert page.findtext("h3") == "art eval: 2 of 3 gates missed"
    assert [row[-1].text or row[-1].findtext("strong") for row in page.findall("table")[0].iter("tr")][1:] == [
        "holds", "missed", "missed"]  # fmt: skip


def test_check_prints_a_wrong_configuration_as_json(art: Art) -> None:
    code, out, err = art("check", LETTERS / "config.yaml", "train.lr=1", "--json")
    [finding] = json.loads(out)
    assert (code, finding["name"], finding["state"]) == (2, "config", "broken")
    assert "did you mean 'learning_rate'" in finding["message"] and "learning_rate" in err
