"""The models that speed is measured on: Qwen3 of a few sizes with random weights, adapters that are not zero."""

from typing import Any, NamedTuple

import torch
import transformers

from art_cli.models.weights import Weights


class Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    intermediate: int
    vocabulary: int


SIZES = {
    "1M": Size(128, 4, 4, 2, 32, 384, 1024),
    "24M": Size(384, 12, 6, 2, 64, 1152, 8192),
    "100M": Size(768, 14, 12, 4, 64, 2304, 8192),
}
MAX_LENGTH = 8192


def build(size: str, *, has_adapter: bool, dtype: torch.dtype = torch.float32) -> Weights:
    """The same weights on every call. LoRA of rank 16 on all linear layers, its B random so that A has a gradient."""
    hidden, layers, heads, heads_kv, head_dim, intermediate, vocabulary = SIZES[size]
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        head_dim=head_dim,
        intermediate_size=intermediate,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
    )
    torch.manual_seed(0)
    model: Any = transformers.Qwen3ForCausalLM(config).to(dtype)
    if has_adapter:
        model = _with_adapter(model)
    cpu = torch.device("cpu")
    return Weights(model.eval(), Unused(), cpu, dtype, MAX_LENGTH, base=size, has_adapter=has_adapter)


def _with_adapter(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted


class Unused:
    """Stands in for a tokenizer. Prompts are token ids here, and no benchmark reads the text."""

    eos_token_id = None
    unk_token_id = None
    all_special_ids: list[int] = []
    added_tokens_decoder: dict[int, object] = {}
    chat_template = ""

    def get_vocab(self) -> dict[str, int]:
        return {"x": max(size.vocabulary for size in SIZES.values()) - 1}

    def convert_tokens_to_ids(self, token: str) -> int:
        return -1

    def decode(self, ids: list[int], **_: object) -> str:
        return "x" * len(ids)
