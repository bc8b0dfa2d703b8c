"""The models that are measured: Qwen3 with seeded random weights, a tokenizer of as many tokens, and two adapters.

Everything is made by code and nothing is downloaded. A base is written once, as a transformers directory, and read by
every row as a user's model is read.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.order import Order

RANK = 16
ADAPTERS = ("a", "b")  # on all linear layers; their B is random, so that each changes every logit
CONTEXT = 4096  # tokens of prompt and reply together


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),  # config.json of Qwen/Qwen3-0.6B
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936),  # of Qwen/Qwen3-4B
    "small": Shape(64, 2, 4, 2, 32, 128, 2048),
}


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


def load_of(order: Order) -> Load:
    return Load(2, 4, 48, 8, 2) if order.is_small else Load(16, 8, 400, 256, 3)


def base_of(order: Order) -> Path:
    """The directory of the base model, built if it is not there. It appears whole or not at all."""
    from art_cli.runs.durable import new_directory

    path = order.directory / f"base-{order.shape}-{order.dtype}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(path) as empty:
            _build(SHAPES[order.shape], order.dtype, empty)
    return path


def adapter_of(order: Order, name: str) -> Path:
    return base_of(order) / f"adapter-{name}"


def config_of(order: Order, base: Path) -> Any:
    """The `model` section of a configuration."""
    from art_cli.config.schema import LoraConfig, ModelConfig

    length = 512 if order.is_small else CONTEXT
    lora = LoraConfig(rank=RANK, alpha=2 * RANK, targets="all-linear")
    return ModelConfig(base=str(base), dtype=order.dtype, lora=lora, max_length=length)


def _build(shape: Shape, dtype: str, directory: Path) -> None:
    import torch
    import transformers

    tokenizer = make_tokenizer(shape.vocabulary)
    make_config: Any = transformers.Qwen3Config
    config = make_config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads_kv,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=CONTEXT,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _add_adapters(model, directory)


def _add_adapters(model: Any, directory: Path) -> None:
    import peft
    import torch

    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name in ADAPTERS:
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(directory / f"adapter-{name}")


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
