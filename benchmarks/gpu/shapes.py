"""The models that are measured, a tokenizer for those without one, two adapters of each, and how much work a row does.

Qwen3 in four sizes: the published weights where the hub gives them in time, else random ones in the published shape.
SmolLM2-135M has its own weights, from a package. A base is written once, as a transformers directory, and read by every
row as a user's model is read; its weights.txt names where the weights are from.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.order import NotHere, Order

RANK = 16
ADAPTERS = ("a", "b")  # on all linear layers; their B is random, so that each changes every logit
CONTEXT = 4096  # tokens of prompt and reply together
HUB_TIMEOUT_S = 5.0  # longest wait for the hub's first answer
# Downloads a repository into the hub's cache and prints its directory there.
DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
"""


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool = True
    repo: str | None = None  # of the published weights
    download_s: float = 0.0  # longest wait for them


# From the config.json of each repository.
SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, repo="Qwen/Qwen3-0.6B", download_s=60),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936, repo="Qwen/Qwen3-1.7B", download_s=90),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936, repo="Qwen/Qwen3-4B", download_s=120),
    "8b": Shape(4096, 36, 32, 8, 128, 12288, 151_936, is_tied=False, repo="Qwen/Qwen3-8B", download_s=240),
    "small": Shape(64, 2, 4, 2, 32, 128, 2048),
}
SMOLLM2 = "smollm2"  # the one model that is no Qwen3, nor random anywhere
MODELS = ("0.6b", "1.7b", "4b", "8b", SMOLLM2)


class Load(NamedTuple):
    """How much work a row does: prompts with several attempts at each, as in a training step."""

    prompts: int
    attempts: int
    prompt_tokens: int
    new_tokens: int
    repeats: int  # measured after one that is not

    @property
    def num_attempts(self) -> int:
        return self.prompts * self.attempts


LOAD = Load(16, 8, 400, 256, 3)
SMALL_LOAD = Load(2, 4, 48, 8, 2)
SMALL_REAL_LOAD = Load(2, 2, 16, 4, 1)  # of SmolLM2, whose bfloat16 takes a second a token on a CPU without AMX


def load_of(order: Order) -> Load:
    if not order.is_small:
        return LOAD
    return SMALL_REAL_LOAD if order.shape == SMOLLM2 else SMALL_LOAD


def base_of(order: Order) -> Path:
    """Returns the directory of the base model, built if it is not there. It appears whole or not at all."""
    from art_cli.runs.durable import new_directory

    path = _base_path(order)
    if not path.exists():
        with new_directory(path) as empty:
            source = _write_base(order, empty)
            (empty / "weights.txt").write_text(source)
    return path


def built_base(order: Order) -> Path:
    """Returns the same directory, for rows whose process cannot build it. Raises NotHere if it is not there."""
    path = _base_path(order)
    if not path.exists():
        raise NotHere(f"no base model yet: run the row base for {order.shape} first")
    return path


def weights_of(order: Order) -> str | None:
    """Returns where the weights are from, "random" or a repository's name, or None if there is no base yet."""
    path = _base_path(order) / "weights.txt"
    return path.read_text() if path.exists() else None


def _base_path(order: Order) -> Path:
    return order.directory / f"base-{order.shape}"


def adapter_of(order: Order, name: str) -> Path:
    return base_of(order) / f"adapter-{name}"


def make_qwen3(shape: Shape, **tokens: Any) -> Any:
    """Returns the configuration of a Qwen3 in that shape."""
    import transformers

    make_config: Any = transformers.Qwen3Config
    return make_config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads_kv,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=CONTEXT,
        rope_theta=1_000_000.0,
        tie_word_embeddings=shape.is_tied,
        **tokens,
    )


def num_multiplied(config: Any) -> int:
    """Returns how many weights each token is multiplied with: all but the embeddings, which are looked up. Tied ones
    count once, as the head."""
    import torch
    import transformers

    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    num = sum(parameter.numel() for parameter in model.parameters())
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return num if is_tied else num - int(model.get_input_embeddings().weight.numel())


def config_of(order: Order, base: Path) -> Any:
    """The `model` section of a configuration."""
    from art_cli.config.schema import LoraConfig, ModelConfig

    length = 512 if order.is_small else CONTEXT
    lora = LoraConfig(rank=RANK, alpha=2 * RANK, targets="all-linear")
    return ModelConfig(base=str(base), dtype=order.dtype, lora=lora, max_length=length)


def _write_base(order: Order, directory: Path) -> str:
    """Writes base and adapters, and returns where the weights are from. Raises NotHere: SmolLM2 cannot be had."""
    if order.shape == SMOLLM2:
        source = _write_smollm2(directory)
    else:
        shape = SHAPES[order.shape]
        source = shape.repo if shape.repo and _link_published(shape, directory) else _write_random(shape, directory)
    _add_adapters(directory)
    return source


def _write_smollm2(directory: Path) -> str:
    from art_cli.models.builtin_models import smollm2_135m
    from art_cli.runtime.errors import UsageError

    try:
        smollm2_135m(directory)
    except UsageError as error:
        raise NotHere(str(error)) from error
    return "SmolLM2-135M-Instruct"


def _link_published(shape: Shape, directory: Path) -> bool:
    """Returns whether the directory now has links to the published model, which is in the hub's cache."""
    assert shape.repo is not None
    if os.environ.get("HF_HUB_OFFLINE") == "1" or not _has_hub():
        return False
    command = [sys.executable, "-c", DOWNLOAD, shape.repo]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=shape.download_s
        )
    except subprocess.TimeoutExpired:
        print(f"{shape.repo}: not here after {shape.download_s:.0f} s; random weights take its place", file=sys.stderr)
        return False
    if done.returncode:
        return False
    for file in Path(done.stdout.strip().splitlines()[-1]).iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file.resolve())
    return True


def _has_hub() -> bool:
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True  # it answers
    except (OSError, ValueError):
        return False
    return True


def _write_random(shape: Shape, directory: Path) -> str:
    import torch
    import transformers

    tokenizer = make_tokenizer(shape.vocabulary)
    config = make_qwen3(
        shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(_device()):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return "random"


def _add_adapters(directory: Path) -> None:
    import peft
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model = model.to(_device())
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for name in ADAPTERS:
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(directory / f"adapter-{name}")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_tokenizer(size: int) -> Any:
    """A tokenizer of exactly `size` tokens: common English words, bytes, and words that no text has.

    A model with random weights samples every token id alike, so each has to have a text.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from art_cli.models.builtin_models import chat_template, make_tokenizer, words

    texts = [f"{word} {word}" for word in words() for _ in range(2)]
    small = make_tokenizer(texts, template=chat_template(), most_tokens=1500)
    data = json.loads(small.backend_tokenizer.to_str())
    assert len(small) <= size, (len(small), size)
    vocabulary, added = data["model"]["vocab"], data["added_tokens"]
    markers = [token for token in added if token["content"] not in vocabulary]  # their ids are the last ones
    first = size - len(markers)
    vocabulary |= {f"Ġtoken{number}": number for number in range(len(vocabulary), first)}
    for number, token in enumerate(markers, first):
        token["id"] = number
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        eos_token=small.eos_token,
        pad_token=small.pad_token,
        chat_template=small.chat_template,
        clean_up_tokenization_spaces=False,
    )
