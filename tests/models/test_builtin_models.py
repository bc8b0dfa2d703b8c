"""Models that are made by code: a project of any kind can name one and needs no hub."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_cli.models.base_source import find_base
from art_cli.models.builtin_models import tiny, words

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


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("get_order", "search_emails", "list-all2")
]


def replies(directory: Path, num: int, tools: list[dict[str, Any]] | None) -> list[str]:
    """Samples a reply to a question at temperature 1."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "You help."}, {"role": "user", "content": "Where is order A12?"}],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    prompt = torch.tensor([tokenizer.encode(text)] * num)
    torch.manual_seed(0)
    with torch.no_grad():
        made = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=48, pad_token_id=tokenizer.pad_token_id)
    return [tokenizer.decode(ids[prompt.shape[1] :]).replace("<|endoftext|>", "") for ids in made]


def test_it_varies_and_ends_its_turns(tmp_path: Path) -> None:
    tiny(tmp_path)
    said = replies(tmp_path, 24, None)
    ended = [text.removesuffix("<|im_end|>") for text in said if text.endswith("<|im_end|>")]
    assert len(set(said)) >= 20 and len(ended) >= 18
    known = set(words())
    unknown = [word for text in ended for word in text.split() if word not in known]
    assert len(unknown) <= 3 and all(text.strip() for text in ended), unknown


@pytest.mark.slow
def test_it_now_and_then_calls_a_tool_that_is_offered(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert not [text for text in replies(tmp_path, 24, None) if "<tool_call>" in text]
    said = replies(tmp_path, 24, TOOLS)
    calls = [text for text in said if text.startswith("<tool_call>")]
    assert 1 <= len(calls) <= 16
    for text in calls:
        inside = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>")
        call = json.loads(inside)
        assert call["name"] in [tool["function"]["name"] for tool in TOOLS] and call["arguments"] == {}


@pytest.mark.slow
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
    [path] = Path("runs").glob("*/metrics.jsonl")
    metrics = json.loads(path.read_text().splitlines()[0])["metrics"]
    assert metrics["reward_mean"] > 0 and metrics["reward_std"] > 0 and metrics["num_updates"] > 0


def test_a_name_that_is_not_built_in_is_refused_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, art: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {base: builtin:huge}\nrollout: {entry: r.py:f, scenarios: s}\n")
    code, _, err = art("train", "config.yaml")
    assert code == 2 and "config.yaml:1: model.base: no built-in model 'huge'; there are: tiny" in err


def test_a_full_disk_is_not_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build(directory): raise RuntimeError('I/O error: No space (os error 28)')\n")
    with pytest.raises(RuntimeError, match="os error 28"):  # which the command line names as a full disk
        find_base("m.py:build", directory=tmp_path, built=tmp_path / "base")
