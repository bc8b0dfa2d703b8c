"""Stands in for Unsloth where it is not installed: its FastLanguageModel over transformers and peft.

Each install is a directory for sys.path, metadata included, so that it is found the way the real one is. Like the real
one it prints, seeds torch's global generator, and (`ignores_masks`) replaces the attention by one that knows only the
causal mask.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []  # the keyword arguments of each load of the last install


def install(
    directory: Path,
    monkeypatch: Any,
    *,
    version: str = "2026.10.9",
    needs: tuple[str, ...] = ("torch<2.15.0,>=2.4.0", "transformers<=5.99,>=4.52.4", "peft>=0.18"),
    body: str = f"from {__name__} import Honest as FastLanguageModel\nprint('Unsloth: patching')\n",
) -> None:
    """`import unsloth` runs `body` from here on, until the test ends."""
    (directory / "unsloth").mkdir()
    (directory / "unsloth" / "__init__.py").write_text(body)
    info = directory / f"unsloth-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: unsloth", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    importlib.invalidate_caches()
    CALLS.clear()


class Honest:
    """Loads as it is told, attention left as it is."""

    @classmethod
    def from_pretrained(cls, model_name: str, dtype: torch.dtype, load_in_4bit: bool, **rest: Any) -> tuple[Any, Any]:
        import transformers

        from art_cli.models import precision

        print(f"Unsloth: loading {model_name}")
        CALLS.append({"model_name": model_name, "dtype": dtype, "load_in_4bit": load_in_4bit, **rest})
        few_bits = (
            {"quantization_config": precision.quantization_settings(dtype), "device_map": "cpu"} if load_in_4bit else {}
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype, **few_bits)
        return model, None

    @classmethod
    def get_peft_model(
        cls, model: Any, r: int, lora_alpha: int, target_modules: Any, use_gradient_checkpointing: Any, **rest: Any
    ) -> Any:
        import peft

        CALLS[-1] |= {"r": r, "lora_alpha": lora_alpha, "target_modules": target_modules}
        torch.manual_seed(rest.pop("random_state"))
        lora = peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules, task_type="CAUSAL_LM", **rest)
        made = peft.get_peft_model(model, lora)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)  # a fresh one is zero, and would not show
            if "lora_" in name:
                parameter.data = parameter.data.to(model.dtype)
        return made


class IgnoresMasks(Honest):
    @classmethod
    def from_pretrained(cls, model_name: str, **rest: Any) -> tuple[Any, Any]:
        model, tokenizer = super().from_pretrained(model_name, **rest)
        for layer in model.model.layers:
            layer.self_attn.forward = _causal(layer.self_attn)
        return model, tokenizer


class HoldsOn(Honest):
    """Its pass of the whole model is that of the modules which were loaded, whatever stands in their place."""

    @classmethod
    def from_pretrained(cls, model_name: str, **rest: Any) -> tuple[Any, Any]:
        model, tokenizer = super().from_pretrained(model_name, **rest)
        for layer in model.model.layers:
            plain = layer.forward
            layer.forward = lambda *args, plain=plain, **rest: plain(*args, **rest)
        return model, tokenizer


class QuantizesNothing(Honest):
    @classmethod
    def from_pretrained(cls, model_name: str, load_in_4bit: bool, **rest: Any) -> tuple[Any, Any]:
        return super().from_pretrained(model_name, load_in_4bit=False, **rest)


def _causal(attention: Any) -> Callable[..., Any]:
    plain = attention.forward

    def forward(*args: Any, tree: Any = None, attention_mask: Any = None, **rest: Any) -> Any:
        before = attention.config._attn_implementation
        attention.config._attn_implementation = "sdpa"
        try:
            return plain(*args, attention_mask=None, **rest)
        finally:
            attention.config._attn_implementation = before

    forward.__module__ = "unsloth.models.qwen3"
    return forward
