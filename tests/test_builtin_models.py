"""Models that are made by code: a project of any kind can name one and needs no hub."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from art_cli.builtin_models import tiny

ROLLOUT = """
async def rollout(policy, scenario):
    reply = await policy.client.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": scenario["question"]}], max_tokens=8
    )
    return len(set(reply.choices[0].message.content)) / 100
"""


def test_a_model_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tiny(tmp_path / name)
        files = sorted((tmp_path / name).iterdir())
        digests.append([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
    assert digests[0] == digests[1]


def test_its_tokenizer_reads_back_any_text_and_spends_a_token_on_a_common_word(tmp_path: Path) -> None:
    tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the mother found water", '{"name": "look", "arguments": {"é": [1, 2]}}', "日本\n\t <tool_call>\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the mother found water")) <= 8


def test_a_project_trains_with_it_and_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, art: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rollout.py").write_text(ROLLOUT)
    Path("scenarios.jsonl").write_text('{"id": 1, "question": "which word?"}\n')
    Path("config.yaml").write_text(
        "model: {base: builtin:tiny}\n"
        "rollout: {entry: rollout.py:rollout, scenarios: scenarios.jsonl, group_size: 4, groups_per_step: 1}\n"
        "train: {steps: 1}\n"
    )
    code, _, err = art("train", "config.yaml")
    assert code == 0, err
    [metrics] = Path("runs").glob("*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[0])["metrics"]["reward_mean"] > 0


def test_a_name_that_is_not_built_in_is_refused_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, art: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {base: builtin:huge}\nrollout: {entry: r.py:f, scenarios: s}\n")
    code, _, err = art("train", "config.yaml")
    assert code == 2 and "config.yaml:1: model.base: no built-in model 'huge'; there are: tiny" in err
