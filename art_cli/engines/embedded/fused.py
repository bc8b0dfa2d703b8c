"""The forward pass of common decoders with as few calls as it takes, on the model's own weights.

With small models a step costs what its Python and kernel calls cost: transformers' layers with PEFT's around them make
about 130 a layer, this makes 40. It knows the layers that Llama, Mistral, Qwen2 and Qwen3 share, and computes what they
compute: the same weights (views of the parameters, no copies), the adapters beside them, residuals added in place.
Whoever uses it compares it with the model first (runner.py); a model it does not know is run by transformers.

Adapters are LoRA (arXiv:2106.09685): W x + scaling B A x.
"""

from typing import Any

import torch
import torch.nn.functional as F

from art_cli.engines.embedded.attention import Layout

Tensor = torch.Tensor

KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class Unknown(Exception):
    """A layer or setting that is not computed here; the message says which."""


class FusedDecoder:
    """Views of a model's weights in the order they are used. To be built anew when the weights have changed."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, adapters put in. Raises Unknown."""
        check_known(model)
        self._embed = plain_weight(model.model.embed_tokens, torch.nn.Embedding)
        self._rotary = model.model.rotary_emb
        window = getattr(model.config, "sliding_window", None)  # where the layers do not say
        self._layers = [_Layer(layer, window) for layer in model.model.layers]
        self._norm = model.model.norm
        self._head = _Linear(model.lm_head)

    def logits(self, layout: Layout, rows: Tensor) -> Tensor:
        """[len(rows), V]"""
        hidden = F.embedding(layout.tokens_T, self._embed)  # [T, hidden]
        cos, sin = (part[0][:, None] for part in self._rotary(hidden[None], layout.positions_T[None]))
        half = sin.shape[2] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for layer in self._layers[:-1]:
            hidden = layer(hidden, layout, cos, sin)
        return self._head(_normed(self._norm, self._layers[-1](hidden, layout, cos, sin, rows)))


class _Layer:
    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._query, self._key, self._value = map(_Linear, (attention.q_proj, attention.k_proj, attention.v_proj))
        self._out = _Linear(attention.o_proj)
        self._gate, self._up, self._down = map(_Linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self._head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else None
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._index, self._window = attention.layer_idx, getattr(attention, "sliding_window", window)

    def __call__(self, hidden: Tensor, layout: Layout, cos: Tensor, sin: Tensor, rows: Tensor | None = None) -> Tensor:
        """`hidden` with the layer's two residuals added in place; of `rows` alone, where only they are read of it."""
        normed = _normed(self._attention_norm, hidden)
        query, key, value = (
            linear(normed).view(len(hidden), -1, self._head_dim) for linear in (self._query, self._key, self._value)
        )
        if self._head_norms is not None:
            query, key = (_normed(norm, states) for norm, states in zip(self._head_norms, (query, key), strict=True))
        out = layout.attend(
            self._index,
            _rotated(query, cos, sin),
            _rotated(key, cos, sin),
            value,
            scaling=self._scaling,
            window=self._window,
        )
        out = out.reshape(len(hidden), -1)
        if rows is not None:
            out, hidden = out[rows], hidden[rows]
        self._out.add_to(hidden, out)
        normed = _normed(self._mlp_norm, hidden)
        self._down.add_to(hidden, F.silu(self._gate(normed), inplace=True).mul_(self._up(normed)))
        return hidden


class _Linear:
    """A linear layer with its active adapters."""

    def __init__(self, module: Any) -> None:
        self._adapters: list[tuple[Tensor, Tensor, float]] = []
        base = module
        if type(module) is not torch.nn.Linear:
            base = adapted(module)
            for name in module.active_adapters:
                if name in module.lora_A:
                    down, up = module.lora_A[name].weight, module.lora_B[name].weight
                    self._adapters.append((down.detach().t(), up.detach().t(), module.scaling[name]))
        self._weight = plain_weight(base, torch.nn.Linear).t()
        self._bias = None if base.bias is None else base.bias.detach()
        self._is_single = self._weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)
        for down, up, scaling in self._adapters:
            if self._is_single:
                out.addmm_(torch.mm(x, down), up, alpha=scaling)
            else:  # adapters are float32 beside a base that is not
                out = out.to(up.dtype).addmm_(torch.mm(x.to(down.dtype), down), up, alpha=scaling).to(x.dtype)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += self(x); in float32 without a matrix in between."""
        if not self._is_single or self._bias is not None:
            residual += self(x)
            return
        residual.addmm_(x, self._weight)
        for down, up, scaling in self._adapters:
            residual.addmm_(torch.mm(x, down), up, alpha=scaling)


def check_known(model: Any) -> None:
    """Raises Unknown."""
    if type(model).__name__ not in KNOWN:
        raise Unknown(f"class {type(model).__name__}")
    if model.config.hidden_act != "silu":
        raise Unknown(f"activation {model.config.hidden_act}")


def adapted(module: Any) -> Any:
    """The base layer of a plain LoRA layer."""
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear:
        raise Unknown(f"layer {type(module).__name__}")
    is_plain = not (module.merged or module.disable_adapters or module.fan_in_fan_out or module.lora_variant)
    has_dropout = any(type(dropout) is not torch.nn.Identity for dropout in module.lora_dropout.values())
    has_bias = any(up.bias is not None for up in module.lora_B.values())
    if not is_plain or has_dropout or has_bias:
        raise Unknown("an adapter that is not plain LoRA")
    return module.base_layer


def plain_weight(module: Any, kind: type) -> Tensor:
    is_plain = type(module) is kind
    if not is_plain:
        raise Unknown(f"layer {type(module).__name__}")
    weight: Tensor = module.weight.detach()
    return weight


def _normed(norm: Any, x: Tensor) -> Tensor:
    """RMSNorm over the last dimension. Below float32 the model's own module says where it rounds."""
    if x.dtype != torch.float32:
        normed: Tensor = norm(x)
        return normed
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of [T, heads, head_dim]; the first half of `sin` is negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[2] // 2, -1), sin)
