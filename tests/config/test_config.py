"""Configuration: what composes, what wins, and what each mistake is told as."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.checks import untrainable
from art_cli.config.compose import LoadedConfig, load_config, load_judge, load_sweep
from art_cli.config.config_identity import NOT_TRAINING, config_changes, config_hash
from art_cli.config.overrides import MAX_SUFFIX, all_keys, expand, groups, suffixes, variants
from art_cli.config.schema import RunConfig
from art_cli.config.sections.base_config import Section
from art_cli.runtime.errors import ConfigError, first_sentence

PLAIN = 'model: {base: m}\nrollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own empty directory is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "config.yaml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(text: str, *overrides: str) -> RunConfig:
    return load_config(write(text), overrides).config


def mistakes(text: str, *overrides: str) -> list[str]:
    """The lines of the ConfigError that loading raises."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


NOISE = "judge.noise={false_positive: 0.2, false_negative: 0.1}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("judge.noise=votes",), "one score"),
        (("judge=ruler", "judge.noise=votes"), "judge.votes=4"),
        (("judge=ruler", NOISE), "gives scores"),
        ((NOISE, "loss=gdpo", "loss.reward_parts={win: 1}"), "also learns from something else"),
        (("judge.noise={false_positive: 0.5, false_negative: 0.5}",), "must be below 1"),
        (("judge.noise={false_positive: 0.5}",), "or neither"),
    ],
)
def test_noise_that_cannot_be_used_is_refused(overrides: tuple[str, ...], told: str) -> None:
    assert told in "\n".join(mistakes(PLAIN, *overrides))


# --- what composes ----------------------------------------------------------------------------------------------------


def test_a_file_that_names_model_rollout_and_scenarios_is_a_whole_configuration() -> None:
    config = load(PLAIN)
    assert config == RunConfig.model_validate(
        {
            "name": Path.cwd().name,
            "runs": Path.cwd() / "runs",
            "model": {"base": "m"},
            "rollout": {"entry": "rollout.py:rollout", "scenarios": "scenarios.jsonl"},
        }
    )


@pytest.mark.parametrize(
    ("file", "name"), [("my/config.yaml", "my"), ("my/fast.yaml", "fast"), ("a b/config.yml", "a-b"), ("_x.yml", "x")]
)
def test_a_run_without_a_name_is_called_after_its_file_or_directory(file: str, name: str) -> None:
    assert load_config(write(PLAIN, file)).config.name == name


def test_the_file_with_a_defaults_list_is_composed_as_hydra_does() -> None:
    """`_self_` is last where it is not written: the file's own train.steps (3) beats the one it inherits (2)."""
    write(PLAIN + "train: {steps: 2, seed: 5}\n", "base.yaml")
    config = load("defaults: [base, {loss: dapo}]\ntrain: {steps: 3}\nloss: {clip: 0.1}\n")
    assert (config.train.steps, config.train.seed) == (3, 5)
    assert (config.loss.name, config.loss.clip) == ("dapo", 0.1)


def test_self_first_lets_the_inherited_file_win() -> None:
    write(PLAIN + "train: {steps: 2}\n", "base.yaml")
    assert load("defaults: [_self_, base]\ntrain: {steps: 3}\n").train.steps == 2


def test_a_section_that_is_only_a_name_is_the_groups_choice() -> None:
    config = load(PLAIN + "engine: embedded\nloss: gspo\n")
    assert (config.engine.name, config.loss.name) == ("embedded", "gspo")


def test_a_section_without_a_name_is_the_default_variant() -> None:
    config = load(PLAIN + "loss: {kl: 0.1}\n")
    assert (config.loss.name, config.loss.kl) == ("grpo", 0.1)


def test_an_empty_section_is_as_good_as_none() -> None:
    assert load(PLAIN + "train:\nengine:\neval:\n") == load(PLAIN)


def test_groups_beside_the_file_are_found_and_come_before_the_packaged_ones() -> None:
    write("name: openai\nurl: http://mine\nmodel: q\n", "engine/mine.yaml")
    write("name: gspo\nclip: 0.5\n", "loss/grpo.yaml")
    config = load(PLAIN, "engine=mine", "loss=grpo")
    assert config.engine.model_dump()["base_url"] == "http://mine"
    assert (config.loss.name, config.loss.clip) == ("gspo", 0.5)


def test_a_group_that_is_no_section_is_composed_at_its_package() -> None:
    write("# @package _global_\ntrain: {steps: 9}\n", "experiment/long.yaml")
    assert load(PLAIN, "experiment=long").train.steps == 9
    assert load(PLAIN, "+experiment=long", "train.steps=4").train.steps == 4


def test_a_mandatory_choice_is_made_on_the_command_line() -> None:
    text = "defaults:\n- loss: ???\n" + PLAIN
    assert load(text, "loss=cispo").loss.name == "cispo"
    assert "loss=<OPTION>" in mistakes(text)[0]


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_TEST_BASE", "from-env")
    config = load(
        'model: {base: "${oc.env:ART_TEST_BASE}"}\n'
        'rollout: {entry: "r.py:r", scenarios: s, group_size: "${train.steps}"}\ntrain: {steps: 4}\n',
        "train.steps=6",
    )
    assert (config.model.base, config.rollout.group_size) == ("from-env", 6)


def test_a_number_with_an_exponent_is_a_number_in_file_and_override() -> None:
    assert load(PLAIN + "train: {learning_rate: 1e-6}\n").train.learning_rate == 1e-6
    assert load(PLAIN, "train.learning_rate=3e-4").train.learning_rate == 3e-4


def test_the_learning_rate_is_open_until_the_model_is_known() -> None:
    assert load(PLAIN).train.learning_rate == "auto"
    with pytest.raises(AssertionError, match="decided when the base model is known"):
        _ = load(PLAIN).train.rate
    assert load(PLAIN + "train: {learning_rate: 1e-5}\n").train.rate == 1e-5


def test_anchors_and_merge_keys_are_yaml_as_usual() -> None:
    text = PLAIN + "train: &t {steps: 3}\nsft:\n  <<: {demos: d, epoch: 2}\n"
    assert mistakes(text) == ["config.yaml:5: sft.epoch: no such key; did you mean 'epochs'?"]


# --- what wins --------------------------------------------------------------------------------------------------------

JUDGED = PLAIN + "judge: {name: ruler, model: openai/gpt-6.1-sol, votes: 3}\n"


@pytest.mark.slow
@pytest.mark.parametrize("override", ["judge=rollout", "judge.name=rollout", "judge={name: rollout}"])
@pytest.mark.parametrize("inherited", [False, True])
def test_a_group_chosen_on_the_command_line_leaves_nothing_of_the_files_section(override: str, inherited: bool) -> None:
    write(JUDGED, "base.yaml")
    text = "defaults: [base]\njudge: {votes: 5}\n" if inherited else JUDGED
    assert load(text, override).judge.model_dump() == {"name": "rollout", "noise": None}


def test_the_same_group_chosen_again_forgets_the_files_knobs() -> None:
    assert load(JUDGED, "judge=ruler").judge.model_dump()["votes"] == 1


def test_values_win_over_file_and_chosen_group_in_any_order() -> None:
    config = load(PLAIN + "loss: {name: dapo, clip: 0.1}\n", "loss.clip=0.3", "loss=gspo", "train.steps=7")
    assert (config.loss.name, config.loss.clip, config.train.steps) == ("gspo", 0.3, 7)


def test_a_group_in_the_defaults_list_gives_way_as_well() -> None:
    text = "defaults: [{loss: dapo}]\n" + PLAIN + "loss: {overlong: mask}\n"
    assert load(text, "loss=gspo").loss.name == "gspo"


def test_a_dictionary_with_a_name_is_choice_and_values_at_once() -> None:
    config = load(JUDGED, "loss={name: dapo, clip: 0.4}")
    assert (config.loss.name, config.loss.clip) == ("dapo", 0.4)


def test_a_dictionary_for_a_plain_section_is_merged() -> None:
    config = load(PLAIN + "train: {steps: 3, seed: 4}\n", "train={seed: 9}")
    assert (config.train.steps, config.train.seed) == (3, 9)


def test_null_and_tilde_take_a_section_away() -> None:
    text = JUDGED + "eval: {scenarios: e}\n"
    for override in ("eval=null", "~eval"):
        assert load(text, override).eval is None
    for override in ("judge=null", "~judge"):
        assert load(text, override).judge.name == "rollout"
    assert load(PLAIN, "model.lora=null").model.lora is None


def test_lists_and_quotes_are_hydras() -> None:
    config = load(
        "model: {base: m}\nrollout: {scenarios: s}\n", "rollout.command=[node, agent.js]", "model.base='a, b: c'"
    )
    assert (config.rollout.command, config.model.base) == (["node", "agent.js"], "a, b: c")


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_in_reading_order_with_key_and_place() -> None:
    text = """\
name: my run
model:
  bas: x
  lora: {rank: many, targets: {a: 1}}
rollout: {entry: "r.py:r", scenarios: s, group_size: 0, temperature: 0.3}
engine: embeded
judge: {name: rulr}
loss:
  name: gspo
  overlong: mask
  clp: 3
learning_rate: 1e-5
train.steps: 3
train: {updates_per_step: true, warmup_steps: "${train.nope}", seed: "???"}
tracker: {name: wandb, mode: off}
hydra: {run: {dir: x}}
"""
    lines = mistakes(text, "train.learning_rate=fast", "learner=tpu", "model.lora.alpha=1,2", "rollout.concurency=3")
    assert lines == [
        "config.yaml:1: name: \"my run\": only letters, digits, '.', '_' and '-', and a letter or digit first",
        'config.yaml:2: model.base: missing: A hub id, a directory, a GGUF file (on the hub: "owner/name:file.gguf"), '
        'or "file.py:function", which writes model and tokenizer into a directory',
        "config.yaml:3: model.bas: no such key; did you mean 'base'?",
        'config.yaml:4: model.lora.rank: expected a whole number, not "many"',
        'config.yaml:4: model.lora.targets: expected text or a list, not {"a": 1}',
        "config.yaml:5: rollout.group_size: expected a number greater than 0, not 0",
        "config.yaml:5: rollout.temperature: no such key; did you mean 'rollout.sampling.temperature'?",
        f"config.yaml:6: engine: no engine 'embeded'; did you mean 'embedded'? There are: {there_are('engine')}",
        f"config.yaml:7: judge.name: no judge 'rulr'; did you mean 'ruler'? There are: {there_are('judge')}",
        "config.yaml:10: loss.overlong: loss 'gspo' does not use 'overlong'; 'dapo' does",
        "config.yaml:11: loss.clp: no such key; did you mean 'clip'?",
        "config.yaml:12: learning_rate: no such key; did you mean 'train.learning_rate' or 'sft.learning_rate'?",
        "config.yaml:13: train.steps: a key with dots is not read; nest it: train: {steps: ...}",
        "config.yaml:14: train.seed: '???' is a place for a value; give one here or on the command line",
        "config.yaml:14: train.updates_per_step: expected a number, not true",
        "config.yaml:14: train.warmup_steps: Interpolation key 'train.nope' not found",
        "config.yaml:15: tracker.mode: expected 'online' or 'offline', not false; "
        "YAML takes a bare on, off, yes or no for true or false: quote it",
        "config.yaml:16: hydra: Hydra's own settings have no effect here",
        f"command line: learner: no learner 'tpu'; there are: {there_are('learner')}",
        "command line: model.lora.alpha: several values: add --multirun for a run of each, or write one list as [a,b]",
        "command line: rollout.concurency: no such key; did you mean 'concurrency'?",
        "command line: train.learning_rate: expected a number or 'auto', not \"fast\"",
    ]


def there_are(group: str) -> str:
    return ", ".join(sorted(variants(RunConfig, group)))


def test_a_value_still_to_be_given_is_a_mistake_until_it_is_given() -> None:
    text = PLAIN + "train:\n  seed: ???\n"
    assert mistakes(text)[0].startswith("config.yaml:4: train.seed: '???' is a place for a value")
    assert load(text, "train.seed=4").train.seed == 4


def test_mistakes_inside_lists_and_named_sections_are_told_where_they_are() -> None:
    text = """\
model: {base: m}
rollout:
  scenarios: s
  command: [a, "${nope}", "???", "${oc.env:ART_NOT_SET}"]
judge:
  name: ruler
  panel:
  - {model: a/b, wieght: 2}
"""
    assert mistakes(text) == [
        "config.yaml:4: rollout.command.1: Interpolation key 'nope' not found",
        "config.yaml:4: rollout.command.2: '???' is a place for a value; give one here or on the command line",
        "config.yaml:4: rollout.command.3: Environment variable 'ART_NOT_SET' not found",
        "config.yaml:8: judge.panel.0.wieght: no such key; did you mean 'weight'?",
    ]
    blend = "judge={name: blend, blend: {strict: 1.0}, judges: {strict: {name: ruler, modell: x}}}"
    assert mistakes(PLAIN, blend) == ["command line: judge.judges.strict.modell: no such key; did you mean 'model'?"]
    assert mistakes(PLAIN, "trian.steps=1") == ["command line: trian: no such key; did you mean 'train'?"]


def test_usual_slips_get_the_line_to_write() -> None:
    assert mistakes("model: builtin:tiny\nrollout: {entry: a.py:b, scenarios: s}\n") == [
        "config.yaml:1: model: expected a section of 'key: value' lines, not \"builtin:tiny\"; "
        'write model: {base: "builtin:tiny"}'
    ]
    assert "is chosen in `defaults: [{model: qwen3-0.6b}, _self_]`" in mistakes("model: qwen3-0.6b\n")[0]
    assert mistakes("model: {base: m}\n")[0].startswith("config.yaml:1: rollout: missing: The agent and its scenarios")
    assert mistakes(PLAIN, "name=${HOST}")[0].endswith("for an environment variable write ${oc.env:HOST}")


def test_a_number_where_text_is_wanted_is_that_text() -> None:
    config = load("model: {base: m}\nrollout: {command: [agent, 5], scenarios: s}\n", "name=7")
    assert (config.rollout.command, config.name) == (["agent", "5"], "7")


def test_a_secret_under_a_wrong_key_is_not_repeated() -> None:
    text = PLAIN + "engine: {name: openai, url: u, model: m, api_key: sk-secret}\n"
    assert mistakes(text) == ["config.yaml:3: engine.api_key: no such key; did you mean 'api_key_env'?"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "a: [1,\nb: 2\n",
            "config.yaml:3: not valid YAML: while parsing a flow sequence from line 1: expected ',' or ']'",
        ),
        (
            "a: 1\na: 2\n",
            "config.yaml:2: not valid YAML: while constructing a mapping from line 1: found duplicate key a",
        ),
        ("a: 1\n\tb: 2\n", "config.yaml:2: not valid YAML: a line begins with a tab, or a value does; use spaces"),
        ("- a\n- b\n", "config.yaml:1: expected 'key: value' lines, not a list"),
        (
            "defaults: oops\n",
            "config.yaml:1: defaults: expected a list, such as [base, {loss: dapo}]",
        ),
        ("defaults: null\n", "config.yaml:1: defaults: expected a list, such as [base, {loss: dapo}]"),
        ("defaults: [{engine: tpu}]\n", "config.yaml:1: defaults: no engine 'tpu'; there are: "),
        ("defaults: [nowhere]\n", "config.yaml:1: defaults: no nowhere.yaml in "),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(text: str, line: str) -> None:
    assert [line] == [found[: len(line)] for found in mistakes(text)]


def test_hydras_own_entries_of_a_defaults_list_have_no_effect() -> None:
    assert load("defaults: [{override hydra/launcher: basic}, override hydra/job_logging: none]\n" + PLAIN) == load(
        PLAIN
    )


def test_a_mapping_over_an_inherited_list_is_one_line() -> None:
    write(PLAIN + "trackers: {name: wandb}\n", "base.yaml")
    [line] = mistakes("defaults: [base]\ntrackers: [{name: wandb}]\n")
    assert line.startswith("config.yaml:1: defaults: ")


def test_a_syntax_error_in_an_inherited_file_names_that_file() -> None:
    write("model: {base: m\n", "base.yaml")
    assert mistakes("defaults: [base]\n") == [
        "base.yaml:2: not valid YAML: while parsing a flow mapping from line 1: "
        "expected ',' or '}', but got '<stream end>'"
    ]


def test_a_mistake_in_an_inherited_file_or_group_names_that_file() -> None:
    write(PLAIN + "train:\n  step: 1\n", "base.yaml")
    write("name: openai\nurl: u\nmodel: m\ntimeout: 1\n", "engine/mine.yaml")
    assert mistakes("defaults: [base]\n", "engine=mine") == [
        "base.yaml:4: train.step: no such key; did you mean 'steps'?",
        "engine/mine.yaml:4: engine.timeout: no such key; did you mean 'timeout_s'?",
    ]


def test_what_a_group_chosen_on_the_command_line_lacks_is_the_command_lines_mistake() -> None:
    what = (
        'The function as "file.py:function", or a class "file.py:Class", a subclass of art_cli.Judge (docs/judges.md)'
    )
    problem = f"command line: judge.entry: missing: {what}"
    assert mistakes(JUDGED, "judge=function") == [problem]


def test_every_key_is_told_of_in_whole_sentences() -> None:
    """What is printed of a key that is missing, for each key of each section that there is."""

    def below(section: type[Section]) -> Iterator[type[Section]]:
        yield section
        for one in section.__subclasses__():
            yield from below(one)

    said = {
        f"{section.__name__}.{name}": first_sentence(field.description)
        for section in below(Section)
        for name, field in section.model_fields.items()
        if field.description
    }
    assert len(said) > 200
    assert [key for key, sentence in said.items() if not sentence.endswith(".")] == []
    assert [key for key, text in said.items() for a, b in ("()", "[]", "{}") if text.count(a) != text.count(b)] == []
    (line,) = mistakes(PLAIN + "sft: {epochs: 60}\n")
    assert line.endswith('"file.py:function" that returns such objects')


def test_a_file_that_is_not_there_is_told_with_the_nearest_that_is(here: Path) -> None:
    write(PLAIN, "my/config.yaml")
    for path, line in {
        "my/confg.yaml": "my/confg.yaml: no such file; did you mean 'my/config.yaml'?",
        "my/config": "my/config: no such file; did you mean 'my/config.yaml'?",
        "mi/config.yaml": "mi/config.yaml: no such file: the directory mi does not exist",
        "my": "my: a directory; name the file in it, for example my/config.yaml",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(Path(path))
        assert str(caught.value) == line


def test_overrides_that_cannot_be_read_are_all_told() -> None:
    told = ["train.steps", "model.base=a=b", '+engine.args={"enforce-eager": true}', "=3", "--x=1", "hydra.run.dir=x"]
    assert mistakes(PLAIN, *told, "judge@x=ruler") == [
        "command line: train.steps: expected key=value, for example train.steps=10",
        "command line: model.base: cannot read the value 'a=b'; quote it for the shell and for Hydra: "
        "model.base='\"a=b\"'",
        "command line: +engine.args: cannot read the value '{\"enforce-eager\": true}'; a mapping's keys "
        "need no quotes: +engine.args='{enforce-eager: true}'",
        "command line: expected key=value, for example train.steps=10",
        "command line: --x: expected key=value, for example train.steps=10",
        "command line: hydra.run.dir: Hydra's own settings and packages have no effect here",
        "command line: judge@x: Hydra's own settings and packages have no effect here",
    ]
    assert mistakes(PLAIN, "~nope") == ["command line: nope: nothing there to remove"]
    lacks = [
        f"command line: a: cannot read the value '{text}', which lacks its closing " for text in ("{b: 1", "[1, 2")
    ]
    assert mistakes(PLAIN, "a={b: 1", "a=[1, 2") == [lacks[0] + "}", lacks[1] + "]"]


def test_the_advice_on_quoting_works() -> None:
    """What the advice says arrives in art as `model.base="a=b"`, the shell's quotes gone."""
    assert load(PLAIN, 'model.base="a=b"').model.base == "a=b"


def test_a_knob_of_another_variant_is_told_in_a_section_within_a_section_too() -> None:
    [line] = mistakes(PLAIN, "loss.off_policy={name: icepop, cap: 3}")
    told = "loss.off_policy 'icepop' does not use 'cap', but low, high; 'truncate' and 'sequence_mask' and 'dppo' do"
    assert line == f"command line: loss.off_policy.cap: {told}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("addition", "line"),
    [
        ("loss: {kl: 0.1}\n", "config.yaml:4: loss.kl: needs model.lora: the reference policy is the model"),
        ("engine: vllm\n", "config.yaml:4: engine: 'vllm' swaps LoRA adapters and cannot follow whole weights"),
        ("loss: {name: dapo, overlong_buffer: 9}\n", "config.yaml:4: loss.overlong_buffer: used with loss.overlong"),
        (
            "loss: {name: gigpo, step_weight: 0, gamma: 0.9}\n",
            "config.yaml:4: loss.gamma: used within equal states only",
        ),
        (
            "loss: {name: ppo, value_coefficient: 2}\n",
            "config.yaml:4: loss.value_coefficient: used with loss.value_trunk",
        ),
        (
            "loss: {name: ppo, value_clip: 0.1}\ntrain: {epochs_per_step: 1}\n",
            "config.yaml:4: loss.value_clip: used with train.updates_per_step or",
        ),
        (
            "loss: {name: rloo, off_policy: {name: icepop}}\n",
            "config.yaml:4: loss.off_policy: leaves single tokens out, and here the ratio of a whole sample",
        ),
        ("loss: {name: ppo, mean_over: all}\n", "config.yaml:4: loss.mean_over: has no effect here"),
        ("train: {updates_per_step: 17}\n", "config.yaml:4: train.updates_per_step: at most rollout.groups_per_step"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(addition: str, line: str) -> None:
    text = "model: {base: m, lora: null}\n\n" + PLAIN.splitlines(keepends=True)[1] + addition
    assert [line] == [found[: len(line)] for found in mistakes(text)]


def test_echo_needs_a_second_turn() -> None:
    [line] = mistakes(PLAIN, "loss.echo=0.1", "rollout.max_turns=1")
    assert "loss.echo: what the environment answers is in a later prompt, and rollout.max_turns is 1" in line


@pytest.mark.parametrize("name", ["openai.BadRequestError", "Nope Error", ""])
def test_a_failure_that_no_exception_can_have_as_its_class_is_refused(name: str) -> None:
    (said,) = mistakes(PLAIN, f"rollout.failures=['{name}']")
    assert said.startswith(f"command line: rollout.failures: {name!r} is not the name of a class")


def test_variables_are_named_for_a_command_alone() -> None:
    assert mistakes(PLAIN, "rollout.env=[HF_TOKEN]")[0].startswith("command line: rollout.env: only the program of")
    (said, *_) = mistakes(PLAIN, "rollout.env=['A=b']")
    assert said.startswith("command line: rollout.env: 'A=b' is not a variable name")


def test_entry_and_command_exclude_each_other() -> None:
    text = "model: {base: m}\nrollout: {entry: 'r.py:r', command: [x], scenarios: s}\n"
    assert mistakes(text)[0].startswith("config.yaml:2: rollout: set exactly one of 'entry'")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("engine={name: openai, url: u, model: m}", "engine"),
        ("rollout.group_size=1", "rollout.group_size"),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature"),
    ],
)
def test_what_composes_but_cannot_be_trained_is_refused_by_the_training_commands(override: str, key: str) -> None:
    assert list(untrainable(load(PLAIN))) == []
    assert [found for found, _ in untrainable(load(PLAIN, override))] == [key]


def test_with_a_critic_a_group_of_one_can_be_trained_and_none_is_refilled() -> None:
    assert list(untrainable(load(PLAIN, "rollout.group_size=1", "loss=ppo"))) == []
    assert mistakes(PLAIN + "loss: ppo\n", "rollout.refill=0.5")[0].startswith("command line: rollout.refill: replaces")


def test_what_goes_by_rewards_that_differ_in_a_group_needs_more_than_one_attempt() -> None:
    [said] = mistakes(PLAIN + "loss: ppo\n", "rollout.group_size=1", "rollout.choose=adaptive")
    assert "differ" in said and "group_size is 1" in said


def test_a_shrunk_baseline_needs_rewards_that_compare_across_scenarios() -> None:
    shrunk = "loss: {baseline: shrunk}\n"
    assert load(PLAIN + shrunk).loss.name == "grpo"
    assert "loss.baseline: 'shrunk' compares scenarios" in mistakes(PLAIN + shrunk, "judge=ruler")[0]
    assert "loss.baseline: 'shrunk' compares groups" in mistakes(PLAIN + shrunk, "loss.scale_advantages=true")[0]


@pytest.mark.parametrize(
    "loss",
    ["{name: reinforce++}", "{name: gdpo, reward_parts: {win: 1, brevity: 0.5}}", "{baseline: shrunk}"],
)
def test_a_loss_that_learns_from_equal_rewards_has_none_of_them_replaced(loss: str) -> None:
    assert "these teach as well" in mistakes(PLAIN + f"loss: {loss}\n", "rollout.refill=0.5")[0]
    assert load(PLAIN + "loss: {name: reinforce++, baseline: true}\n", "rollout.refill=0.5").rollout.refill == 0.5


def test_a_distillation_whose_sources_have_judges_needs_none_beside_them() -> None:
    teacher = "loss: {name: distill, teacher: {model: org/teacher}}\n"
    text = """
model: {base: m}
rollout: {sources: {a: {entry: "rollout.py:rollout", scenarios: a.jsonl, judge: {name: metric, metric: won}}}}
"""
    assert load(text + teacher).loss.name == "distill"
    assert load(PLAIN + teacher).judge.name == "none"


def test_stale_tokens_cannot_be_weighed_on_a_server() -> None:
    settings = ("engine=tinker", "learner=tinker", "engine.base_url=http://127.0.0.1:1", "train.max_staleness=1")
    assert [said for said in mistakes(PLAIN, *settings) if "off_policy" in said] == []


def test_an_algorithm_of_ones_own_may_report_any_number_of_a_step() -> None:
    rules = "stop: [{metric: teacher_kl, above: 1}, {metric: value_mean, above: 1}]\n"
    assert "teacher_kl" in mistakes(PLAIN + rules)[0]
    assert len(load(PLAIN + rules + "algorithm: {entry: 'own.py:Own'}\n").stop) == 2


def test_a_judge_that_ranks_is_refused_where_there_is_one_attempt_to_rank() -> None:
    alone = ("rollout.group_size=1", "loss=ppo")
    ruler = ("judge=ruler", "judge.model=gpt-4o")
    assert list(untrainable(load(PLAIN, "loss=ppo", *ruler))) == []
    assert [key for key, _ in untrainable(load(PLAIN, *alone, *ruler))] == ["judge"]
    blend = "judge: {name: blend, blend: {ruler: 0.5, rollout: 0.5}, judges: {ruler: {name: ruler, model: gpt-4o}}}\n"
    assert [key for key, _ in untrainable(load(PLAIN + blend, *alone))] == ["judge"]


# --- paths, and what is left alone ------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_file_wherever_art_is_started(here: Path) -> None:
    write(PLAIN.replace("base: m", "base: m, chat_template: t.jinja") + "runs: out\n", "my/deep/config.yaml")
    loaded = load_config(Path("my/deep/config.yaml"))
    assert loaded.directory == here / "my/deep"
    assert loaded.config.runs == here / "my/deep/out"
    assert loaded.config.model.chat_template == here / "my/deep/t.jinja"


def test_a_leading_tilde_is_the_home_directory_wherever_a_path_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load(
        PLAIN.replace("scenarios: scenarios.jsonl", "scenarios: ~/tasks.jsonl") + "sft: {demos: ~/demos.jsonl}\n"
    )
    assert config.rollout.scenarios is not None and config.rollout.scenarios.source == "/home/me/tasks.jsonl"
    assert config.sft is not None and config.sft.demos == "/home/me/demos.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["a b", "it's", "a=b,c", "a[1]", "ünï", "50%", "${x}"])
def test_a_directory_may_be_called_anything(folder: str) -> None:
    write("name: dapo\n", f"{folder}/loss/mine.yaml")
    loaded = load_config(write(PLAIN, f"{folder}/my.config.v2.yaml"), ["loss=mine", "tracker=none"])
    assert (loaded.config.loss.name, loaded.config.name) == ("dapo", "my.config.v2")


def test_composing_writes_nothing_and_changes_no_directory_and_no_logging(here: Path) -> None:
    import logging

    before = (logging.getLogger().handlers[:], logging.getLogger().level, os.getcwd())
    load(PLAIN, "loss=dapo")
    assert (logging.getLogger().handlers, logging.getLogger().level, os.getcwd()) == before
    assert os.listdir(here) == ["config.yaml"]


def test_an_application_of_hydras_around_it_is_left_as_it_was() -> None:
    write("x: 1\n", "app/main.yaml")
    with initialize_config_dir(str(Path("app").resolve()), version_base="1.3"):
        load(PLAIN, "loss=dapo")
        assert compose("main") == {"x": 1}
    assert not GlobalHydra.instance().is_initialized()


GOES_WITH = {  # the errors of these alone
    ("judge", "none"): "set loss=distill",
    ("loss", "sdpo"): "choose judge=ruler",
    ("learner", "tinker"): "set engine=tinker",
    ("learner", "prompt"): "cannot reflect",
}


@pytest.mark.slow
def test_every_variant_can_be_chosen_on_the_command_line_and_in_a_defaults_list(here: Path) -> None:
    """Each is an option by its name; what it needs besides is missing, and nothing else is wrong."""
    for group in groups(RunConfig):
        for name in variants(RunConfig, group):
            for text, overrides in ((PLAIN, [f"{group}={name}"]), (f"defaults: [{{{group}: {name}}}]\n{PLAIN}", [])):
                try:
                    is_auto = (group, name) == ("learner", "auto")
                    assert getattr(load(text, *overrides), group).name == ("torch" if is_auto else name)
                except ConfigError as error:
                    needs = (": missing", GOES_WITH.get((group, name), ": missing"))
                    assert all(any(need in str(problem) for need in needs) for problem in error.problems), error


# --- only a judge -----------------------------------------------------------------------------------------------------


def test_a_judge_is_chosen_without_a_configuration(here: Path) -> None:
    loaded = load_judge(None, ["judge=function", "judge.entry=j.py:judge"])
    assert (loaded.config.model_dump()["entry"], loaded.directory) == ("j.py:judge", here)
    assert load_judge(None).config.name == "rollout"
    with pytest.raises(ConfigError, match="^command line: train: no such key"):
        load_judge(None, ["train.steps=3"])


def test_a_judge_is_taken_from_a_configuration() -> None:
    assert load_judge(write(JUDGED)).config.model_dump()["votes"] == 3


# --- identity ---------------------------------------------------------------------------------------------------------


def dumped(loaded: RunConfig) -> dict[str, object]:
    return json.loads(loaded.model_dump_json())


def test_what_does_not_train_is_in_the_schema() -> None:
    """A knob renamed in the schema must be renamed in the list as well."""
    assert set(all_keys(RunConfig)) >= NOT_TRAINING


@pytest.mark.parametrize(
    "override",
    ["name=other", "runs=/x", "gateway.port=99", "tracker=wandb", "train.steps=9", "learner.micro_batch_tokens=9"],
)
def test_what_does_not_train_changes_no_hash(override: str) -> None:
    one, other = load(PLAIN), load(PLAIN, override)
    assert one != other
    assert config_hash(one) == config_hash(other)
    assert config_changes(dumped(one), dumped(other)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ("train.learning_rate=1e-4", ['train.learning_rate: "auto" -> 0.0001']),
        ("loss=dapo", ["loss: grpo -> dapo"]),
        (
            "model.lora=null",
            ['model.lora: {"rank": 16, "alpha": 32, "targets": "all-linear"} -> null'],
        ),
        ("loss.kl=0.5", ["loss.kl: 0.0 -> 0.5"]),
        ("train.betas=[0.9,0.95]", ["train.betas: [0.9, 0.999] -> [0.9, 0.95]"]),
        ("rollout.scenarios=b.jsonl", ['rollout.scenarios: "scenarios.jsonl" -> "b.jsonl"']),
    ],
)
def test_what_trains_changes_the_hash_and_is_named(override: str, lines: list[str]) -> None:
    one, other = load(PLAIN), load(PLAIN, override)
    assert config_hash(one) != config_hash(other)
    assert list(map(str, config_changes(dumped(one), dumped(other)))) == lines


def test_a_price_of_a_panels_member_makes_no_other_run() -> None:
    panel = "judge={{name: ruler, panel: [{{model: openai/gpt-6.1-sol, price: {{input: {}, output: 8}}}}]}}"
    one, other = load(PLAIN, panel.format(2)), load(PLAIN, panel.format(3))
    assert config_changes(dumped(one), dumped(other)) == []
    assert config_changes(dumped(one), dumped(load(PLAIN, panel.format(2).replace("sol", "luna")))) != []


def test_the_length_of_a_run_trains_where_the_rate_decays_over_it() -> None:
    """A run may go on with another length, and records the change."""
    one, other = load(PLAIN, "train.decay=linear"), load(PLAIN, "train.decay=linear", "train.steps=9")
    assert config_hash(one) != config_hash(other)
    [change] = config_changes(dumped(one), dumped(other))
    assert (str(change), change.is_allowed) == ("train.steps: 50 -> 9", True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.decay_to=0.1"], "train.decay_to: used with train.decay 'linear' or 'cosine' only"),
        (
            ["train.decay=cosine", "train.steps=5", "train.warmup_steps=5"],
            "train.decay: the warm-up of 5 steps leaves none of train.steps (5) for it",
        ),
        (["sft={demos: d, patience: 2}"], "sft.patience: used with an evaluation loss only"),
        (["sft={demos: d, min_reward: 1}"], "sft.min_reward: used with sft.best_of only"),
        (["train.betas=[0.9]"], "train.betas: "),
        (["train.betas=[0.9,1.0]"], "train.betas"),
    ],
)
def test_an_optimizer_that_cannot_be_made_or_a_knob_without_effect_is_named(overrides: list[str], message: str) -> None:
    [mistake] = mistakes(PLAIN, *overrides)
    assert message in mistake


def test_a_project_that_is_moved_keeps_its_hash() -> None:
    text = PLAIN.replace("base: m", "base: m, chat_template: t.jinja")
    one, other = load_config(write(text, "a/config.yaml")), load_config(write(text, "b/config.yaml"))
    assert one.config.model.chat_template != other.config.model.chat_template
    assert config_hash(one.config) == config_hash(other.config)


def test_a_knob_that_a_newer_version_adds_is_named() -> None:
    old = dumped(load(PLAIN))
    assert isinstance(train := old["train"], dict)
    del train["seed"]
    assert list(map(str, config_changes(old, dumped(load(PLAIN))))) == ["train.seed: null -> 0"]


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_product_of_its_values_the_last_key_fastest() -> None:
    """2 x 1 x 2 runs, in the order of Hydra's own basic sweeper."""
    assert expand(["a=1,2", "b=x", "c=range(0,2)"]) == [
        ["a=1", "b=x", "c=0"],
        ["a=1", "b=x", "c=1"],
        ["a=2", "b=x", "c=0"],
        ["a=2", "b=x", "c=1"],
    ]
    assert expand(["a=choice(1,2)", "+b='x,y'"]) == [["a=1", "+b='x,y'"], ["a=2", "+b='x,y'"]]
    assert expand(["a=[1,2],[3]"]) == [["a=[1,2]"], ["a=[3]"]]
    assert expand(["loss=glob(d*,exclude=di*)"]) == [["loss=dapo"], ["loss=dr_grpo"]]
    assert expand([]) == [[]]


def test_an_interval_cannot_be_swept() -> None:
    with pytest.raises(ConfigError, match="^command line: a: an interval has no list of values"):
        expand(["a=interval(0,1)"])


def test_each_run_of_a_sweep_has_a_name_of_its_own() -> None:
    runs = load_sweep(
        write(PLAIN + "name: ttt\n"), ["train.learning_rate=1e-5,1e-4", "loss=dapo,gspo", "train.steps=3"]
    )
    assert [(run.config.name, run.config.train.learning_rate, run.config.loss.name) for run in runs] == [
        ("ttt-learning_rate-1e-05-loss-dapo", 1e-5, "dapo"),
        ("ttt-learning_rate-1e-05-loss-gspo", 1e-5, "gspo"),
        ("ttt-learning_rate-0.0001-loss-dapo", 1e-4, "dapo"),
        ("ttt-learning_rate-0.0001-loss-gspo", 1e-4, "gspo"),
    ]
    assert all(isinstance(run, LoadedConfig) and run.config.train.steps == 3 for run in runs)


def test_a_sweep_over_nothing_is_the_one_run() -> None:
    assert [run.config.name for run in load_sweep(write(PLAIN), ["name=x"])] == ["x"]


@given(st.lists(st.text("ab /:,'=", min_size=1, max_size=60), min_size=2, max_size=4, unique=True))
def test_suffixes_differ_and_fit_a_file_name(values: list[str]) -> None:
    quoted = ",".join('"' + value + '"' for value in values)
    found = suffixes([f"model.base={quoted}", "model.max_length=1,2"])
    assert len(set(found)) == len(found) == 2 * len(values)
    for suffix in found:
        assert len(suffix) <= MAX_SUFFIX + 9
        RunConfig.model_validate(
            {"name": f"x-{suffix}", "model": {"base": "m"}, "rollout": {"entry": "e", "scenarios": "s"}}
        )
