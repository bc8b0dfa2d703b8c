"""Writes GGUF files, the format of llama.cpp and Ollama, with the package gguf: whole models or LoRA adapters.

llama's rotary layers need the rows of q and k in a different order than transformers; gemma3's norms are stored with 1
added. Vectors are written in float32. q4_0 keeps the embedding and the head in q8_0, where rounding hurts most. Models
and tokenizers that llama.cpp would compute differently are rejected by name.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_cli.runtime.errors import UsageError

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}  # by model_type
WIDE = ("token_embd.weight", "output.weight")  # tensors that q4_0 keeps in q8_0
BLOCK = 32  # values with a common scale in q8_0 and q4_0
GEMMA3_PATTERN = 6  # every sixth layer of gemma3 has full attention; llama.cpp hard-codes this number
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names for ways to split text, keyed by the regular expressions in tokenizer.json
SPLITS = {
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}",): "llama-bpe",
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",): "qwen2",
    ("digits", "gpt-2"): "smollm",
    ("gpt-2",): "gpt-2",
}


def architecture_of(config: Any) -> str:
    """Returns llama.cpp's name for the architecture. Raises UsageError if it is unsupported or gguf is missing."""
    if find_spec("gguf") is None:
        raise UsageError("--gguf: needs the package gguf: pip install 'art-cli[gguf]'")
    name = ARCHITECTURES.get(config.model_type)
    if name is None:
        raise UsageError(f"--gguf: a model of type {config.model_type}; it writes {', '.join(ARCHITECTURES)}")
    for problem in _differences(config, name):
        raise UsageError(f"--gguf: {problem}, which llama.cpp would compute differently from the policy")
    return name


def _differences(config: Any, architecture: str) -> list[str]:
    """Returns model settings that a GGUF file cannot express."""
    kinds = _ropes(config)
    found = [f"rope of type {rope['rope_type']}" for rope in kinds.values() if rope["rope_type"] != "default"]
    layers = list(getattr(config, "layer_types", None) or [])
    if architecture == "gemma3":
        is_full = [layer == "full_attention" for layer in layers]
        if is_full != [(index + 1) % GEMMA3_PATTERN == 0 for index in range(len(layers))]:
            found.append(f"full attention in other layers than every {GEMMA3_PATTERN}th")
        if config.query_pre_attn_scalar != config.head_dim:
            found.append("query_pre_attn_scalar is not head_dim")
        if kinds["sliding_attention"]["rope_theta"] != 10_000.0:
            found.append("a rope of sliding layers other than 10000")
    elif any(layer != "full_attention" for layer in layers):
        found.append("sliding attention")
    return found


def _ropes(config: Any) -> dict[str, Any]:
    """Returns the rope of each layer kind; models with one kind use the key "full_attention"."""
    rope: dict[str, Any] = config.rope_parameters
    return rope if "full_attention" in rope else {"full_attention": rope}


def write_model(file: Path, model: Any, tokenizer: Any, *, kind: str, name: str) -> None:
    """Writes a transformers model without adapter and its tokenizer. Raises UsageError if GGUF cannot express them."""
    import gguf

    config = model.config
    architecture = architecture_of(config)
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_ropes(config)["full_attention"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    file_types = {"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
    writer.add_file_type(gguf.LlamaFileType[file_types[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    _add_tensors(writer, model, architecture, kind)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: Any, model: Any, architecture: str, kind: str) -> None:
    import gguf

    names = _Names(architecture, model.config)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        written, values = names.of(name), names.ordered(name, tensor.detach().float().cpu()).numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        form = "f32"
        if values.ndim > 1:
            form = "q8_0" if kind == "q4_0" and written in WIDE else kind
            form = form if values.shape[-1] % BLOCK == 0 else "f16"
        wanted = gguf.GGMLQuantizationType[form.upper()]
        writer.add_tensor(written, gguf.quants.quantize(values, wanted), raw_dtype=wanted)


class _Names:
    """Maps a model's tensors to llama.cpp's names and row order."""

    def __init__(self, architecture: str, config: Any) -> None:
        import gguf

        found = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
        self.map = gguf.get_tensor_name_map(found, config.num_hidden_layers)
        self.heads: dict[str, int] = {}
        if architecture == "llama":
            self.heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def of(self, name: str) -> str:
        """Returns llama.cpp's name for a tensor. Raises UsageError for unknown tensors."""
        found: str | None = self.map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UsageError(f"--gguf: the tensor {name}, which llama.cpp does not have in this architecture")
        return found

    def ordered(self, name: str, tensor: Any) -> Any:
        """Returns the tensor in llama.cpp's row order: rotary pairs are adjacent instead of in two halves."""
        num = next((heads for part, heads in self.heads.items() if f".{part}." in f"{name}."), None)
        if num is None:
            return tensor
        pairs = tensor.reshape(num, 2, tensor.shape[0] // num // 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def write_adapter(file: Path, adapter: Path, config: Any) -> None:
    """Writes PEFT's adapter for a model of this configuration. Raises UsageError for parts that GGUF does not have."""
    import gguf
    from safetensors.torch import load_file

    architecture = architecture_of(config)
    saved = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    wrong = [key for key in ("alpha_pattern", "modules_to_save", "use_dora", "lora_bias") if saved.get(key)]
    if wrong or saved.get("bias", "none") != "none":
        raise UsageError(f"--gguf-adapter: the adapter has {', '.join(wrong) or 'bias'}, which the format does not")
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    scale = math.sqrt(saved["r"]) if saved.get("use_rslora") else 1.0
    writer.add_float32("adapter.lora.alpha", float(saved["lora_alpha"]) * scale)
    names = _Names(architecture, config)
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, part, _ = name.removeprefix("base_model.model.").rsplit(".", 2)  # "model...q_proj", "lora_A", "weight"
        if part not in ("lora_A", "lora_B"):
            raise UsageError(f"--gguf-adapter: the tensor {name}, which the format does not have")
        values = names.ordered(module, tensor.float()) if part == "lora_B" else tensor.float()
        writer.add_tensor(f"{names.of(f'{module}.weight')}.{part.lower()}", values.numpy())
    _finish(writer)


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Writes the tokenizer in `tokenizer.json` for a model with `size` rows in its embedding."""
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    if saved["model"]["type"] != "BPE":
        raise UsageError(f"--gguf: a tokenizer of type {saved['model']['type']}; it writes BPE")
    tokens, types = _vocabulary(saved, size)
    is_byte_level = not saved["model"].get("byte_fallback")
    if is_byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_of(saved))
        pairs = saved["model"]["merges"]
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([-float(index) for index in range(size)])  # the earlier token wins between merges
        writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name in ("bos", "eos", "pad", "unk"):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    first = tokenizer("a").input_ids[:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(saved: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Returns all tokens by id, and their types; embedding rows without a token become unused tokens."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    unknown = saved["model"].get("unk_token")
    added = {token["id"]: token for token in saved["added_tokens"]}
    numbered = {index: token for token, index in saved["model"]["vocab"].items()}
    numbered |= {index: token["content"] for index, token in added.items()}
    if max(numbered) >= size:
        raise UsageError(f"--gguf: the tokenizer has a token {max(numbered)}, and the model {size} rows")
    for index, token in numbered.items():
        is_byte = bool(saved["model"].get("byte_fallback")) and token.startswith("<0x") and token.endswith(">")
        tokens[index], types[index] = token, BYTE if is_byte else UNKNOWN if token == unknown else NORMAL
        if index in added and token != unknown:
            types[index] = CONTROL if added[index]["special"] else USER_DEFINED
    return tokens, types


def _split_of(saved: dict[str, Any]) -> str:
    """Returns llama.cpp's name for the tokenizer's way to split text. Raises UsageError for unknown ways."""
    first = saved.get("pre_tokenizer") or {}
    parts = tuple(name for part in first.get("pretokenizers", [first]) if (name := _split_name(part)) is not None)
    if parts not in SPLITS:
        raise UsageError("--gguf: llama.cpp does not know how its tokenizer splits text")
    return SPLITS[parts]


def _split_name(part: dict[str, Any]) -> str | None:
    """Returns a part's regular expression or name; None for parts without splitting."""
    kind = part.get("type")
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return str(part["pattern"].get("Regex"))
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "gpt-2" if part.get("use_regex", True) else None
    return "digits" if kind == "Digits" and part.get("individual_digits") else "other"
