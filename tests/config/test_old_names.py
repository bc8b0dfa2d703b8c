"""The address of a server has one name, `base_url`; what older files and runs call it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.compose import load_config
from art_cli.config.config_identity import config_changes, config_hash
from art_cli.config.schema import RulerJudgeConfig
from art_cli.config.sections.base_config import OLD_NAMES
from art_cli.loop.references import check_ready
from art_cli.runtime.errors import ConfigError

PLAIN = "model: {base: builtin:tiny}\nrollout: {entry: 'r.py:f', scenarios: s.jsonl}\n"
A, B = "http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"
SECTIONS = {  # section -> its keys but the address
    "judge": "name: ruler, model: m",
    "judge.panel.0": "name: ruler",
    "engine": "name: openai, model: m",
    "loss.teacher": "name: distill",
}


def text(section: str, address: str) -> str:
    keys = SECTIONS[section]
    if section == "judge.panel.0":
        return f"{PLAIN}judge: {{{keys}, panel: [{{model: m, {address}}}]}}\n"
    if section == "loss.teacher":
        return f"{PLAIN}loss: {{{keys}, teacher: {{model: m, {address}}}}}\n"
    return f"{PLAIN}{section}: {{{keys}, {address}}}\n"


def at(value: Any, section: str) -> Any:
    for part in section.split("."):
        value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", ["base_url", *OLD_NAMES])
def test_each_name_of_an_address_is_read_and_gives_the_same_run(path: Path, section: str, name: str) -> None:
    path.write_text(text(section, f"base_url: '{A}'"))
    today = load_config(path).config
    path.write_text(text(section, f"{name}: '{A}'"))
    assert load_config(path).config == today and at(today, section).base_url == A


@pytest.mark.slow
@pytest.mark.parametrize("section", ["judge", "engine", "loss.teacher"])
@pytest.mark.parametrize(("written", "given"), [("base_url", "api_base"), ("url", "base_url")])
def test_the_command_line_wins_whatever_the_file_calls_it(path: Path, section: str, written: str, given: str) -> None:
    path.write_text(text(section, f"{written}: '{A}'"))
    assert at(load_config(path, [f"{section}.{given}={B}"]).config, section).base_url == B


def test_an_address_under_two_names_in_one_place_is_refused(path: Path) -> None:
    path.write_text(text("judge", f"base_url: '{A}', api_base: '{B}'"))
    with pytest.raises(ConfigError, match="judge: 'base_url' and 'api_base' are one key: keep 'base_url' alone"):
        load_config(path)
    path.write_text(PLAIN)
    with pytest.raises(ConfigError, match="are one key"):
        load_config(path, ["judge=ruler", f"judge.url={A}", f"judge.base_url={B}"])


def test_a_mistake_in_an_old_name_has_its_line(path: Path) -> None:
    path.write_text(f"{PLAIN}judge:\n  name: ruler\n  api_base: nowhere\n")
    with pytest.raises(ConfigError, match=r"config.yaml:5: judge.base_url: 'nowhere' is not an address"):
        check_ready(load_config(path), ["judge"])
    path.write_text(f"{PLAIN}judge:\n  name: ruler\n  api_base: [1]\n")
    with pytest.raises(ConfigError, match=r"config.yaml:5: judge.api_base: expected text"):
        load_config(path)


@pytest.mark.parametrize("name", ["api_bas", "baseurl", "base_ur"])
def test_a_misspelt_name_is_answered_with_the_name_of_today(path: Path, name: str) -> None:
    path.write_text(text("judge", f"{name}: '{A}'"))
    with pytest.raises(ConfigError, match=f"judge.{name}: no such key; did you mean 'base_url'"):
        load_config(path)


def test_a_run_of_the_old_names_goes_on(path: Path) -> None:
    """Its config.json has `judge.api_base`, and its checkpoints a hash with that name."""
    path.write_text(text("judge", f"base_url: '{A}'"))
    config = load_config(path).config
    dumped = config.model_dump(mode="json")
    old = json.loads(json.dumps(dumped).replace('"base_url"', '"api_base"'))
    assert old["judge"]["api_base"] == A and config_changes(old, dumped) == []
    assert [change.key for change in config_changes(old | {"judge": old["judge"] | {"api_base": B}}, dumped)] == [
        "judge.base_url"
    ]
    assert config_hash(config) == config_hash(type(config).model_validate(old))


def test_settings_in_python_may_have_the_old_name() -> None:
    settings: dict[str, Any] = {"name": "ruler", "api_base": A}
    assert RulerJudgeConfig(**settings).base_url == A
    with pytest.raises(ValueError, match="are one key"):
        RulerJudgeConfig(**settings, base_url=B)
