"""`art reward`: what it reads, the agreement it reaches on planted preferences, and the judge that loads its result."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from art_cli.cli import app
from art_cli.config.schema import RewardModelJudgeConfig, TorchLearnerConfig
from art_cli.config.sections.model_config import ModelConfig
from art_cli.config.sections.reward_config import RewardConfig
from art_cli.judges import make_judge
from art_cli.judges.files.person_labels import PersonLabels
from art_cli.judges.shadow_judges import ShadowJudges  # noqa: F401
from art_cli.learners.reward.preferences import Taught, divide, read_preferences
from art_cli.learners.reward.reward_report import ComparedPair, measure
from art_cli.learners.reward.reward_trainer import RewardTrainer, preference_loss
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Json, ScoredTrajectory
from art_cli.runtime.errors import DataError
from tests.support.models.tiny import save_tiny_base, tiny_weights

ASK: Json = {"role": "user", "content": "a word?"}


def attempt(group: str, index: int, text: str, reward: float | None, size: int = 4, **fields: Any) -> ScoredTrajectory:
    return ScoredTrajectory(
        id=f"{group}-{index}", group_id=group, group_size=size, index=index,
        messages=[ASK, {"role": "assistant", "content": text}], reward=reward, **fields,
    )  # fmt: skip


def planted(num: int, seed: int = 0) -> list[ScoredTrajectory]:
    """Groups of four answers; the share of the letter a is the reward."""
    draw = random.Random(seed)
    rows = []
    for group in range(num):
        for index in range(4):
            text = "".join(draw.choices("az", weights=(index + 0.5, 3.5 - index), k=6))
            rows.append(attempt(f"{seed}-{group}", index, text, text.count("a") / 6))
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base") / "tiny", hidden=32)


def art(*words: object) -> int:
    return app.run([str(word) for word in words])


def test_it_learns_planted_preferences_and_the_judge_scores_as_it_did(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """More of the letter a is better: held-out pairs agree at 0.9 or more, and so does the loaded judge on others."""
    write_lines(tmp_path / "scored.jsonl", planted(40))
    write_lines(tmp_path / "now.jsonl", planted(10, seed=1))
    words = ["reward", tmp_path / "scored.jsonl", "-o", tmp_path / "own", "--base", base, "reward.epochs=6"]
    more = ["--present", tmp_path / "now.jsonl", "--next", 3, "--gate", "agreement>=0.9", "--gate", "present.low>=0.8"]
    assert art(*words, "reward.learning_rate=1e-2", *more, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["groups"] == {"trained": 32, "agreement": 8, "present": 10} and len(result["next"]) == 3
    assert json.loads((tmp_path / "own" / "reward.json").read_text())["measures"] == result["measures"]
    assert set(result["measures"]["present"]) == {"all", "reward", "shorter half", "longer half"}
