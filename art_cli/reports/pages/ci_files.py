"""Files for CI: JUnit XML and Markdown from `art eval` and `art report`.

Input is the commands' JSON output; output is text. Names and errors are hostile: they may contain markup, line breaks
and control characters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

from art_cli.reports.pages.report_text import KINDS, cures, evaluation_rows, span, state
from art_cli.runtime.errors import printable

Plain = Mapping[str, Any]
MAX_NAME, MAX_TEXT, MAX_ROWS = 80, 1000, 60  # a GitHub comment holds 65,536 characters
_NO_XML = re.compile("[\ufffe\uffff]")  # not allowed in XML 1.0; `printable` escapes all others
_NO_CODE_SPAN = re.compile(r"[`|\\]")  # ends a code span, or a surrounding table cell


class Case(NamedTuple):
    """A test in a suite. Example: Case("runs/mine", "reward>=0.8", "gate missed: runs/mine: reward is ...")"""

    of: str  # policy or run
    name: str
    failure: str = ""  # "" if passed


def eval_cases(whole: Plain) -> list[Case]:
    """Returns a case per policy, which fails if no attempt counts, and a case per gate."""
    cases = [Case(each["name"], "attempts", each["fault"]) for each in whole["policies"]]
    return cases + [Case(whole["policies"][-1]["name"], each["gate"], each["error"]) for each in whole["gates"]]


def report_cases(report: Plain) -> list[Case]:
    """Returns a case that fails if `art report` exits with 1."""
    return [Case(report["run"], "learned", report["fault"])]


def junit(suite: str, cases: Sequence[Case], digests: Mapping[str, str]) -> bytes:
    """Returns the cases as a JUnit XML suite. `digests` maps policies to digests."""
    counts = {"tests": str(len(cases)), "failures": str(sum(bool(case.failure) for case in cases)), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": suite, **counts})
    parent = ElementTree.SubElement(root, "testsuite", {"name": suite, **counts, "skipped": "0", "time": "0"})
    if named := {name: digest for name, digest in digests.items() if digest}:
        properties = ElementTree.SubElement(parent, "properties")
        for name, digest in named.items():
            ElementTree.SubElement(properties, "property", {"name": f"digest of {_xml(name)}", "value": _xml(digest)})
    for case in cases:
        attributes = {"classname": _xml(case.of), "name": _xml(case.name), "time": "0"}
        test = ElementTree.SubElement(parent, "testcase", attributes)
        if case.failure:
            failure = ElementTree.SubElement(test, "failure", {"message": _xml(case.failure), "type": "failure"})
            failure.text = _xml(case.failure)
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("?", printable(text, limit=MAX_TEXT))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def eval_markdown(whole: Plain, *, hidden: Iterable[str] = (), link: str | None = None) -> str:
    """Returns the gates with verdicts, then a row per policy and metric, without `hidden` metrics."""
    gates, num_missed = whole["gates"], sum(not each["holds"] for each in whole["gates"])
    verdict = f"{num_missed} of {len(gates)} gates missed" if num_missed else "every gate holds" if gates else "no gate"
    faults = [each for each in whole["policies"] if each["fault"]]
    lines = [f"### art eval: {'failed' if faults else verdict}", ""]
    lines += [f"- {_code(each['name'])}: {_code(each['fault'], MAX_TEXT)}" for each in faults] + [""] * bool(faults)
    if gates:
        rows = [
            [_code(each["gate"]), _estimate(each["value"]), "holds" if each["holds"] else "**missed**"]
            for each in gates
        ]
        lines += _table(["gate", "value or difference [95 %]", "verdict"], rows)
    shown = [each for each in whole["metrics"] if each["metric"] not in set(hidden)]
    rows = [
        [_code(each["policy"]), _code(each["metric"]), _estimate(each), str(each["num"]), _difference(each)]
        for each in shown[:MAX_ROWS]
    ]
    lines += _table(["policy", "metric", "mean [95 %]", "scenarios", "difference to the first [95 %]"], rows)
    if len(shown) > MAX_ROWS:
        lines += [f"... and {len(shown) - MAX_ROWS} more rows, in `art eval --json`.", ""]
    lines += [f"- {_code(each['name'])} is {_code(each['digest'])}" for each in whole["policies"] if each["digest"]]
    return _whole(lines, link)


def report_markdown(report: Plain, *, link: str | None = None) -> str:
    """Returns a run's evaluations with differences to evaluation 1, the policy to serve, and findings."""
    lines = [f"### art report: {'nothing was learned' if report['fault'] else state(report)}", "", _code(report["run"])]
    by_step = {str(each["step"]): each for each in report["evaluations"]}
    rows = [[step, reward, _difference(by_step[step]), note] for step, reward, note in evaluation_rows(report)]
    name = report["reward_names"]["eval"]
    lines += ["", *_table(["step", f"{name} [95 %]", "difference to the first [95 %]", ""], rows)]
    if report["offered"]:
        lines += [f"- to serve: {_code(report['offered'], MAX_TEXT)}"]
    kept = {each["step"]: each for each in (report["best"], report["last"]) if each and each["digest"]}
    lines += [f"- step {step} is {_code(each['digest'])}" for step, each in kept.items()]
    for finding in report["findings"]:
        lines += [f"- step {span(finding)}: {KINDS[finding['kind']]}: {_code(finding['text'], MAX_TEXT)}"]
        lines += [f"  - try: {_code(cure, MAX_TEXT)}" for cure in cures(finding)]
    return _whole(lines, link)


def _whole(lines: Sequence[str], link: str | None) -> str:
    page = [] if link is None else ["", f"[The whole page]({quote(link, safe='/:?&=#%@+,;~')})"]
    return "\n".join([*lines, *page]).strip() + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""] if len(rows) > 2 else []


def _difference(each: Plain) -> str:
    return "" if each["difference"] is None else _estimate(each["difference"], sign="+")


def _estimate(each: Plain | None, *, sign: str = "") -> str:
    """Example: "+0.120 [+0.020, +0.220]"."""
    if each is None:
        return ""
    mean, low, high = (None if each[name] is None else f"{each[name]:{sign}.3f}" for name in ("mean", "low", "high"))
    return f"{mean}" if low is None else f"{mean} [{low}, {high}]"


def _code(text: str, limit: int = MAX_NAME) -> str:
    """Returns the text as code, without active mentions, links or markup; long names lose their beginning."""
    text = printable(text, limit=limit) if limit != MAX_NAME or len(text) <= limit else f"...{printable(text[-limit:])}"
    if text and not _NO_CODE_SPAN.search(text):
        return f"`{text}`"
    return f"<code>{re.sub(r'[^a-zA-Z0-9 ]', lambda found: f'&#{ord(found[0])};', text)}</code>"
