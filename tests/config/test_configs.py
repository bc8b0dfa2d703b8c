"""The packaged starting points in configs/: each composes by its own command, and what wins over what."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from art_cli.config.compose import load_backend, load_config
from art_cli.config.config_identity import config_changes, config_hash
from art_cli.config.overrides import variants
from art_cli.config.schema import RunConfig
from art_cli.config.sections.model_config import entry_of
from art_cli.runtime.errors import ConfigError
from tests.support.paths import ROOT

Art = Callable[..., tuple[int, str, str]]
CONFIGS = ROOT / "configs"
FILES = sorted(str(file.relative_to(CONFIGS)) for file in CONFIGS.glob("*/*.yaml"))
PLAIN = 'model: {base: m}\nrollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, *overrides: str) -> RunConfig:
    Path("config.yaml").write_text(text)
    return load_config(Path("config.yaml"), overrides).config


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def command(file: str) -> list[str]:
    """The overrides of the command at the head of a packaged file."""
    text = (CONFIGS / file).read_text()
    found = re.search(r"^# art train config.yaml (.+)$", text.partition("\n\n")[0], flags=re.MULTILINE)
    assert found is not None, "it begins with the command that uses it"
    return shlex.split(found[1])


@pytest.mark.parametrize("file", FILES)
def test_each_file_begins_with_a_command_that_composes_it(file: str) -> None:
    group, name = file.removesuffix(".yaml").split("/")
    overrides = command(file)
    assert overrides[0] == f"{group}={name}"
    config = load(PLAIN, *overrides).model_dump(mode="json")
    given = [one.split("=")[0] for one in overrides[1:]]
    content = yaml.safe_load((CONFIGS / file).read_text())
    content = {group: content} if group == "judge" else content
    for section, keys in content.items():
        for key, value in keys.items():
            if not isinstance(value, dict | list) and key != "noise" and f"{section}.{key}" not in given:
                assert str(config[section][key]) == (entry_of(value) if key == "base" else str(value))


@pytest.mark.parametrize("algorithm", options("algorithm"))
@pytest.mark.parametrize("hardware", options("hardware"))
def test_each_hardware_goes_with_each_algorithm_or_is_refused_by_name(hardware: str, algorithm: str) -> None:
    judge = ["judge=ruler"] if algorithm == "sdpo" else []
    overrides = [f"hardware={hardware}", f"algorithm={algorithm}", *judge]
    if hardware == "remote-tinker" and algorithm in ("ppo", "distill", "sdpo"):
        with pytest.raises(ConfigError, match=f"'{algorithm}' needs more of the model than a server"):
            load(PLAIN, *overrides)
    else:
        config = load(PLAIN, *overrides)
        assert config.loss.name == algorithm and config.learner.name == load(PLAIN, overrides[0]).learner.name


def test_every_loss_is_an_algorithm_here_and_every_option_is_in_the_documentation() -> None:
    assert set(options("algorithm")) == set(variants(RunConfig, "loss"))
    page = (ROOT / "docs/config.md").read_text()
    for file in FILES:
        assert f"{Path(file).stem}`" in page, file


def test_hardware_changes_nothing_that_is_learned() -> None:
    """A run goes on under any other one."""
    plain = load(PLAIN).model_dump(mode="json")
    for hardware in options("hardware"):
        changes = config_changes(plain, load(PLAIN, f"hardware={hardware}").model_dump(mode="json"))
        assert all(change.is_allowed for change in changes), changes


def test_ruler_by_its_name_is_what_it_always_was() -> None:
    """A run that was begun with judge=ruler, before there was a file of that name, has the same configuration."""
    written = load(PLAIN + "judge: {name: ruler}\n")
    for text, override in ((PLAIN, "judge=ruler"), (PLAIN + "judge: ruler\n", ""), (PLAIN, "judge={name: ruler}")):
        assert load(text, *filter(None, [override])).judge == written.judge
    assert config_hash(load(PLAIN, "judge=ruler")) == config_hash(written)


def test_a_list_of_defaults_composes_and_the_file_wins() -> None:
    text = "defaults: [{hardware: laptop}, {judge: ruler}, {algorithm: dapo}, _self_]\n" + PLAIN
    config = load(text + "engine: {max_batch: 5}\nloss: {clip: 0.1}\n")
    assert config.engine.model_dump() == {"name": "embedded", "max_batch": 5, "prefill_tokens": 2048}
    assert (config.judge.name, config.loss.name, config.loss.clip) == ("ruler", "dapo", 0.1)
    other = load(text + "engine: {name: vllm}\nlearner: unsloth\nloss: gspo\n")
    assert (other.engine.name, other.learner.name, other.loss.name) == ("vllm", "unsloth", "gspo")


def test_an_option_on_the_command_line_leaves_nothing_of_another_variant() -> None:
    text = PLAIN + "engine: {name: embedded, max_batch: 3}\nloss: {name: grpo, kl: 0.1}\nalgorithm: {entry: 'a.py:A'}\n"
    config = load(text, "hardware=h100", "algorithm=gspo", "rollout.concurrency=7")
    assert (config.engine.name, config.learner.name, config.rollout.concurrency) == ("vllm", "torch", 7)
    assert (config.loss.name, config.loss.kl, config.algorithm) == ("gspo", 0, None)


def test_a_model_on_the_command_line_replaces_the_files_and_its_rate() -> None:
    text = PLAIN.replace("base: m", "base: m, lora: null, chat_template: x.jinja")
    text += "train: {steps: 3, learning_rate: 1e-6}\n"
    config = load(text, "model=qwen3-4b", "model.max_length=100")
    assert (config.model.base, config.model.max_length, config.model.chat_template) == ("Qwen/Qwen3-4B", 100, None)
    assert (config.train.learning_rate, config.train.steps) == ("auto", 3)


def test_an_unknown_option_is_one_line_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load(PLAIN, "hardware=h10")
    there_are = "gpu-24gb, h100, h100x8, laptop, remote-tinker"
    assert (
        str(caught.value) == f"command line: hardware: no hardware 'h10'; did you mean 'h100'? There are: {there_are}"
    )
    with pytest.raises(ConfigError, match=f"^config.yaml:1: defaults: no hardware 'h10'.* There are: {there_are}$"):
        load("defaults: [{hardware: h10}]\n" + PLAIN)


def test_a_misspelt_group_is_answered_with_the_group() -> None:
    with pytest.raises(ConfigError, match="^command line: hardwere: no such key; did you mean 'hardware'[?]"):
        load(PLAIN, "hardwere=h100")


def test_an_option_that_is_written_as_a_key_is_answered_with_the_list_of_defaults() -> None:
    for key, answer in {
        "hardware: h100": "there are: gpu-24gb, h100, h100x8, laptop, remote-tinker",
        "algorithm: gspo": "`defaults: [{algorithm: gspo}, _self_]`",
    }.items():
        with pytest.raises(ConfigError, match=f"^config.yaml:3: {key.split(':')[0]}: ") as caught:
            load(f"{PLAIN}{key}\n")
        assert answer in str(caught.value) and len(caught.value.problems) == 1


def test_a_backend_takes_of_hardware_what_it_has_a_use_for() -> None:
    loaded = load_backend(None, ["model.base=m", "hardware=h100"])
    assert (loaded.engine.name, loaded.learner.name) == ("vllm", "torch")


@pytest.mark.parametrize(
    "overrides",
    [
        ["hardware=laptop", "model=qwen3-0.6b", "judge=ruler", "train.steps=7"],
        ["hardware=h100", "algorithm=ppo", "rollout.environment=reasoning_gym/countdown"],
        [],
    ],
)
def test_init_prints_a_configuration_that_runs_when_it_is_saved(art: Art, here: Path, overrides: list[str]) -> None:
    code, text, _ = art("init", "--config", *overrides)
    assert code == 0 and text.startswith("# art train config.yaml\n")
    agent = PLAIN if not any("environment" in one for one in overrides) else "model: {base: m}\n"
    saved, composed = load(text), load(agent.replace("base: m", "base: builtin:tiny"), *overrides)
    assert saved == composed


def test_init_refuses_what_does_not_go_together(art: Art) -> None:
    assert art("init", "--config", "hardware=x")[0] == 2
    assert art("init", "mine", "--config", "--recipe", "blank")[0] == 2
    assert art("init")[0] == 2
