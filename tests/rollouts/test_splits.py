"""Held-out scenarios: never trained on, whatever the file's order and additions; overlaps of two files are found."""

import json
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import RunConfig
from art_cli.rollouts.scenario_files import (
    Json,
    RunScenarios,
    find_overlap,
    is_held_out,
)
from art_cli.runtime.errors import ConfigError, DataError

FILE = "model: {base: none}\nrollout: {entry: rollout.py:rollout, scenarios: s.jsonl}\n"


def configure(directory: Path, scenarios: list[Json], evaluation: str) -> RunConfig:
    (directory / "s.jsonl").write_text("".join(json.dumps(scenario) + "\n" for scenario in scenarios))
    (directory / "config.yaml").write_text(FILE + f"eval: {evaluation}\n")
    return load_config(directory / "config.yaml", []).config


def test_a_larger_share_holds_out_more_and_about_that_share() -> None:
    """2,000 ids at 0.1: 200 of them, standard deviation sqrt(2000 * 0.09) = 13.4."""
    small, large = ({id for id in range(2000) if is_held_out(id, share)} for share in (0.1, 0.3))
    assert small < large
    assert abs(len(small) - 200) < 5 * 13.4


def test_training_and_evaluation_are_the_two_parts_of_one_file(tmp_path: Path) -> None:
    scenarios: list[Json] = [{"id": number, "ask": str(number)} for number in range(40)]
    config = configure(tmp_path, scenarios, "{held_out: 0.25}")
    parts = RunScenarios(config, tmp_path)
    trained, held_out = parts.training, parts.evaluation
    assert sorted(scenario["id"] for scenario in trained + held_out) == list(range(40))
    assert trained and held_out
    assert not find_overlap(trained, held_out).same_id


def test_a_share_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    parts = RunScenarios(configure(tmp_path, [{"id": "only"}], "{held_out: 0.5}"), tmp_path)
    with pytest.raises(DataError, match=r"eval\.held_out = 0\.5 of 1 scenarios leaves none to"):
        _ = parts.training, parts.evaluation


@pytest.mark.parametrize("evaluation", ["{every: 3}", "{scenarios: s.jsonl, held_out: 0.1}"])
def test_a_file_or_a_share_is_named_and_not_both(tmp_path: Path, evaluation: str) -> None:
    with pytest.raises(ConfigError, match="set exactly one of 'scenarios'.*and 'held_out'"):
        configure(tmp_path, [{"id": 1}], evaluation)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["0", "1", "10", "-0.1"])
def test_a_share_is_between_0_and_1(tmp_path: Path, share: str) -> None:
    with pytest.raises(ConfigError, match=r"eval\.held_out"):
        configure(tmp_path, [{"id": 1}], f"{{held_out: {share}}}")


def test_scenarios_on_both_sides_are_found_by_id_and_by_content() -> None:
    training: list[Json] = [{"id": 1, "ask": "a"}, {"id": 2, "ask": "b"}, {"id": 3, "ask": "c"}]
    overlap = find_overlap(training, [{"id": "1", "ask": "x"}, {"id": 4, "ask": "b"}, {"id": 5, "ask": "y"}])
    assert overlap == (["1"], ["4"])
    assert str(overlap) == (
        "1 of the evaluation's scenarios are trained on as well (1); "
        "1 more equal a training scenario except for the id (4)"
    )
    assert str(find_overlap(training, [{"id": 9, "ask": "z"}])) == ""


def test_scenarios_that_only_their_ids_tell_apart_are_different_ones() -> None:
    """The id is a seed here, so that equal contents say nothing."""
    training: list[Json] = [{"id": f"train-{n}", "level": 1} for n in range(3)]
    assert str(find_overlap(training, [{"id": "eval-0", "level": 1}])) == ""
