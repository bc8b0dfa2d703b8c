"""Models that their provider shuts down: in litellm's table, in what ships, in `art check`, and in a run's scores."""

import logging
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import JudgeModelConfig, RulerJudgeConfig
from art_cli.config.sections.judge_config import DEFAULT_JUDGE, DEFAULT_PRICE
from art_cli.judges import costs
from art_cli.judges.costs import Price, find_price
from art_cli.judges.retirement import WARN_DAYS, Retirement, find_retiring, hosted_models, retirement_day
from art_cli.judges.trial import require_keys
from tests.support.paths import LETTERS, ROOT

Art = Callable[..., tuple[int, str, str]]
SHIPPED = ("README.md", "art_cli", "configs", "docs", "examples", "recipes")
NAME = re.compile(r"[a-z0-9][a-z0-9./-]*\d[a-z0-9.-]*")  # as models' names look: lower case, with a number
HISTORY = {"openai/o3", "o3"}  # named as what was, never as what to use
PLAIN = 'model: {base: m}\nrollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\n'


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of models in place of litellm's."""
    rows = {
        "dated": {"deprecation_date": "2027-03-01"},
        "alias": {},
        "alias-2026-01-01": {"deprecation_date": "2027-01-01"},
        "alias-20260601": {"deprecation_date": "2027-06-01"},
        "alias-mini-2026-01-01": {"deprecation_date": "2026-01-01"},
        "half": {},
        "half-2026-01-01": {"deprecation_date": "2027-01-01"},
        "half-2026-06-01": {},
        "broken": {"deprecation_date": "soon"},
    }
    monkeypatch.setattr("art_cli.judges.retirement.model_table", lambda: rows)


def set_today(monkeypatch: pytest.MonkeyPatch, today: date) -> None:
    clock = SimpleNamespace(now=lambda zone: datetime(today.year, today.month, today.day, tzinfo=zone))
    monkeypatch.setattr("art_cli.judges.retirement.datetime", clock)


# --- what ships -------------------------------------------------------------------------------------------------------


def shipped_names() -> Iterator[tuple[Path, int, str]]:
    for place in SHIPPED:
        root = ROOT / place
        for path in sorted(root.rglob("*") if root.is_dir() else [root]):
            if path.suffix in (".py", ".md", ".yaml", ".ipynb") and "__pycache__" not in path.parts:
                for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
                    for name in set(NAME.findall(line)) - HISTORY:
                        yield path, number, name.rstrip(".-/")


def test_no_model_that_ships_is_shut_down_within_sixty_days() -> None:
    """By today's date, so that the tests fail two months before a user's run does."""
    assert len(costs.model_table()) > 1000, "litellm is not installed, and its table is what the names are held to"
    assert "openai/o3" not in DEFAULT_JUDGE and retirement_day("openai/o3") == date(2026, 12, 11)
    retiring = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}"
        for path, number, name in shipped_names()
        if (found := find_retiring([name]))
    ]
    assert not retiring, (
        "name a successor in place of these; the default judge is DEFAULT_JUDGE, with DEFAULT_PRICE, in "
        f"art_cli/config/sections/judge_config.py, then `python docs/config.py`: {'; '.join(retiring)}"
    )


def test_the_default_judge_costs_what_the_table_says() -> None:
    price = find_price(JudgeModelConfig())
    assert price is not None
    assert (price.prompt * 1e6, price.completion * 1e6) == pytest.approx((DEFAULT_PRICE.input, DEFAULT_PRICE.output))


def test_the_default_judge_has_a_price_where_litellm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "model_table", dict)
    assert find_price(JudgeModelConfig()) == Price(2e-06, 1e-05, 2e-06)
    assert find_price(JudgeModelConfig(base_url="http://127.0.0.1:1/v1")) is None


def test_seven_votes_of_the_packaged_panel_cost_less_than_half_of_one_of_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(PLAIN)
    panel = load_config(Path("config.yaml"), ["judge=ruler-panel"]).config.judge
    assert isinstance(panel, RulerJudgeConfig) and panel.votes == 7
    one, default = find_price(panel), find_price(JudgeModelConfig())
    assert one and default
    for tokens in ((1000, 0), (0, 1000)):
        assert panel.votes * one.cost(*tokens) < 0.5 * default.cost(*tokens)


# --- the day ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "day"),
    [
        ("dated", date(2027, 3, 1)),
        ("openai/dated", date(2027, 3, 1)),
        ("alias", date(2027, 6, 1)),  # the last snapshot; alias-mini is another model
        ("half", None),  # one of its snapshots has no end
        ("broken", None),
        ("unknown", None),
    ],
)
def test_a_name_ends_with_its_own_day_or_that_of_its_last_snapshot(table: None, model: str, day: date | None) -> None:
    assert retirement_day(model) == day


def test_a_retirement_is_reported_from_sixty_days_before_and_is_over_on_its_day(table: None) -> None:
    day = date(2027, 3, 1)
    for left in (WARN_DAYS + 1, WARN_DAYS, 1, 0, -5):
        found = find_retiring(["dated", "unknown"], today=day - timedelta(days=left))
        assert found == ([Retirement("dated", day, left <= 0)] if left <= WARN_DAYS else [])


def test_every_hosted_model_of_a_configuration_is_found_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blend with a panel, a default, a server of one's own and a rule; a shadow; a source's judge; a policy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    Path("config.yaml").write_text(
        "engine: {name: anthropic, model: policy}\nlearner: {name: prompt, model: openai/writer}\n"
        'rollout: {sources: {one: {entry: "r.py:r", scenarios: s.jsonl}, two: {entry: "r.py:r", scenarios: s.jsonl, '
        "judge: {name: ruler, model: openai/of-source}}}}\n"
        "judge: {name: blend, blend: {ruler: 1, panel: 1, own: 1, free: 1}, judges: {"
        "panel: {name: ruler, panel: [{model: openai/a}, {model: openai/b, base_url: 'http://h/v1'}]}, "
        "own: {name: ruler, model: openai/c, base_url: 'http://h/v1'}, free: {name: ruler, model: 'builtin:rule'}}}\n"
        "shadow: {s: {judge: {name: ruler, model: openai/d}}}\n"
    )
    config = load_config(Path("config.yaml")).config
    wanted = {"policy", "openai/writer", "openai/of-source", DEFAULT_JUDGE, "openai/a", "openai/d"}
    assert set(hosted_models(config)) == wanted
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h/v1")  # that address has other models under these names
    assert set(hosted_models(config)) == {"policy"}


def test_a_judge_that_ends_soon_is_logged_before_it_is_asked(
    table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    set_today(monkeypatch, date(2027, 2, 1))
    with caplog.at_level(logging.WARNING):
        require_keys(RulerJudgeConfig(name="ruler", model="openai/dated"), tmp_path)
    assert "judge: openai/dated is shut down on 2027-03-01" in caplog.text


@pytest.mark.parametrize(
    ("model", "today", "code", "line"),
    [
        ("openai/dated", date(2027, 3, 1), 1, "FAIL    retirement openai/dated was shut down on 2027-03-01"),
        ("openai/dated", date(2027, 2, 1), 130, "!    retirement openai/dated is shut down on 2027-03-01"),
        ("openai/dated", date(2026, 2, 1), 130, "ok   retirement openai/dated 2027-03-01"),
        ("openai/unknown", date(2027, 3, 1), 130, "ok   retirement openai/unknown has no day in the table of litellm"),
    ],
)
def test_check_refuses_a_model_that_is_shut_down_and_says_so_before(
    table: None, art: Art, monkeypatch: pytest.MonkeyPatch, model: str, today: date, code: int, line: str
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    set_today(monkeypatch, today)
    monkeypatch.setattr("art_cli.cli.preflight.rollout_checks.RunScenarios", interrupt)  # it comes next
    found, out, _ = art("check", LETTERS / "config.yaml", "judge=ruler", f"judge.model={model}")
    assert found == code
    assert " ".join(line.split()) in [" ".join(each.split()).partition(" (0.")[0] for each in out.splitlines()]
    assert (f"the default is {DEFAULT_JUDGE}" in out) == ("shut down" in line)
