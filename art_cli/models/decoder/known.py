"""Known decoder layers: reads a layer's weights in one shape, or raises Unknown with the reason.

The layers are those of Llama, Mistral, Qwen2 and Qwen3, as transformers has them, with or without plain LoRA
(arXiv:2106.09685) on their projections. It computes nothing.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from art_cli.models.decoder.maths import Norm, Projection

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
PACKAGES = ("transformers", __name__.partition(".")[0])


class Unknown(Exception):
    """A layer or setting that is not computed here. The message names it."""


class Layer(NamedTuple):
    """The weights of one decoder layer, views of the model's own tensors."""

    attention_norm: Norm
    query: Projection
    key: Projection
    value: Projection
    head_norms: tuple[Norm, Norm] | None  # norms of queries and of keys, or None if the family has none
    out: Projection
    mlp_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    head_dim: int
    number: int  # its position among the layers
    scaling: float
    window: int | None  # number of tokens that a token sees, itself included, or None if all before it

    @property
    def projections(self) -> tuple[Projection, ...]:
        return (self.query, self.key, self.value, self.out, self.gate, self.up, self.down)

    def merging(self) -> "Layer":
        """Returns the same layer, multiplying by the sum of weights and adapter."""
        return Layer._make(part.merging() if isinstance(part, Projection) else part for part in self)

    @property
    def input_tensors(self) -> tuple[Tensor | None, ...]:
        """All that comes before the attention: the norm's weight, those of the heads' norms, and of each projection."""
        norms = self.head_norms or (None, None)
        weights = [None if norm is None else norm.weight for norm in (self.attention_norm, *norms)]
        return (*weights, *(tensor for projection in self.projections[:3] for tensor in projection.tensors))

    @property
    def output_tensors(self) -> tuple[Tensor | None, ...]:
        """All that comes after the attention: the norm's weight, and those of each projection."""
        return (self.mlp_norm.weight, *(tensor for projection in self.projections[3:] for tensor in projection.tensors))


def check_model(model: Any) -> None:
    """Raises Unknown: a causal LM whose embedding, last norm and head are not those of the known families."""
    name = type(model).__name__
    if name not in {f"{family}ForCausalLM" for family in FAMILIES}:
        raise Unknown(f"class {name}")


def read_layer(layer: Any) -> Layer:
    """Returns the layer's weights as they are now. Raises Unknown."""
    names = {f"{family}DecoderLayer" for family in FAMILIES}
    if not any(kind.__name__ in names for kind in type(layer).__mro__):  # sharding makes subclasses
        raise Unknown(f"layer {type(layer).__name__}")
    attention, mlp = layer.self_attn, layer.mlp
    for module in (layer, attention, mlp):
        _check_forward(module)
    if not is_silu(mlp.act_fn):
        raise Unknown(f"activation {type(mlp.act_fn).__name__}")
    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=read_norm(layer.input_layernorm),
        query=read_projection(attention.q_proj),
        key=read_projection(attention.k_proj),
        value=read_projection(attention.v_proj),
        head_norms=(read_norm(attention.q_norm), read_norm(attention.k_norm)) if has_head_norms else None,
        out=read_projection(attention.o_proj),
        mlp_norm=read_norm(layer.post_attention_layernorm),
        gate=read_projection(mlp.gate_proj),
        up=read_projection(mlp.up_proj),
        down=read_projection(mlp.down_proj),
        head_dim=attention.head_dim,
        number=attention.layer_idx,
        scaling=attention.scaling,
        window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
    )


def read_norm(module: Any) -> Norm:
    """Raises Unknown: another norm. Gemma's, which counts its weight from 1, names its epsilon otherwise."""
    if not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        raise Unknown(f"norm {type(module).__name__}")
    return Norm(module.weight, module.variance_epsilon)


def read_projection(module: Any) -> Projection:
    """A plain linear layer, or one under PEFT's plain LoRA with one adapter active. Raises Unknown: anything else.

    While the adapters are off, or where the active one leaves this layer out, it is the linear layer alone.
    """
    if type(module) is torch.nn.Linear:
        return Projection(module.weight, module.bias)
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear:
        raise Unknown(f"layer {type(module).__name__}")
    lora: Any = module
    base, names = lora.base_layer, [name for name in lora.active_adapters if name in lora.lora_A]
    is_plain = type(base) is torch.nn.Linear and not (lora.merged or lora.fan_in_fan_out or lora.lora_variant)
    has_dropout = any(type(lora.lora_dropout[name]) is not torch.nn.Identity for name in names)
    if not is_plain or has_dropout or len(names) > 1 or any(lora.lora_B[name].bias is not None for name in names):
        raise Unknown("an adapter that is not plain LoRA")
    if lora.disable_adapters or not names:
        return Projection(base.weight, base.bias)
    [name] = names
    return Projection(base.weight, base.bias, lora.lora_A[name].weight, lora.lora_B[name].weight, lora.scaling[name])


def is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _check_forward(module: Any) -> None:
    """Raises Unknown: code that neither transformers nor this package put there, such as Unsloth's."""
    package, _, _ = (getattr(module.forward, "__module__", None) or "").partition(".")
    if package not in PACKAGES:
        raise Unknown(f"{type(module).__name__} with a forward of {package or 'no module'}")
