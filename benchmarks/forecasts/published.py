"""The configurations of published models, from the numbers of their config.json; nothing is downloaded."""

from typing import Any

import transformers

from benchmarks.gpu.shapes import SHAPES, Shape, make_qwen3

QWEN3 = {shape.repo.rpartition("/")[2]: shape for shape in SHAPES.values() if shape.repo}
QWEN3 |= {"Qwen3-14B": Shape(5120, 40, 40, 8, 128, 17_408, 151_936, is_tied=False)}


def published(base: str, *, layers: int | None = None) -> Any:
    """Returns the transformers configuration of a model, or of its first layers."""
    config = _published(base.rpartition("/")[2])
    if layers is not None and layers != config.num_hidden_layers:
        config = type(config)(**_asked(config.to_dict()) | {"num_hidden_layers": layers})
    return config


def _asked(numbers: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers without the kinds of the layers, which follow from how many there are."""
    return {name: value for name, value in numbers.items() if name not in ("layer_types", "model_type")}


def _published(name: str) -> Any:
    if name in QWEN3:
        config = make_qwen3(QWEN3[name])
        config.max_position_embeddings = 40_960
        return config
    match name:
        case "Qwen2.5-1.5B":
            return transformers.Qwen2Config(
                hidden_size=1536,
                num_hidden_layers=28,
                num_attention_heads=12,
                num_key_value_heads=2,
                intermediate_size=8960,
                vocab_size=151_936,
                tie_word_embeddings=True,
                max_position_embeddings=32_768,
            )
        case "Llama-3.2-1B-Instruct":
            return transformers.LlamaConfig(
                hidden_size=2048,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=8192,
                vocab_size=128_256,
                tie_word_embeddings=True,
                max_position_embeddings=131_072,
            )
        case "Llama-3.1-8B":
            return transformers.LlamaConfig(
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=14_336,
                vocab_size=128_256,
                max_position_embeddings=131_072,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            )
        case "Gemma-3-4B":
            return transformers.Gemma3TextConfig(
                hidden_size=2560,
                num_hidden_layers=34,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=256,
                intermediate_size=10_240,
                vocab_size=262_208,
                sliding_window=1024,
                max_position_embeddings=131_072,
            )
        case "builtin_models:smollm2-135m" | "art_cli.builtin_models:smollm2-135m":
            return transformers.LlamaConfig(
                hidden_size=576,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                intermediate_size=1536,
                vocab_size=49_152,
                tie_word_embeddings=True,
                max_position_embeddings=8192,
            )
    raise KeyError(f"{name}: write the numbers of its config.json here")
