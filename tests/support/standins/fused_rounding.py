"""An engine's arithmetic as vLLM's fused kernels round it: transformers' sums, with other roundings below float32.

The norm reads the residual sum before it is rounded, the norm's weight is multiplied before the one rounding, and
silu(gate) * up is rounded once. Scores of a random model in bfloat16 are as far from transformers' as vLLM's are.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from art_cli.models.decoder.forward import read_layer, read_norm, read_projection, rotary
from art_cli.models.decoder.maths import Norm, rotate
from art_cli.models.weights import Weights


class _Row:
    def __init__(self, token_ids: Sequence[int], device: torch.device) -> None:
        self.tokens_T = torch.tensor(list(token_ids), device=device)
        self.positions_T = torch.arange(len(token_ids), device=device)


@torch.no_grad()
def fused_scores(weights: Weights, token_ids: Sequence[int]) -> list[float]:
    """Returns [L - 1] logprobs in nats of each token after the first, by a Llama or Qwen model with or without LoRA."""
    model = weights.model.get_base_model() if hasattr(weights.model, "get_base_model") else weights.model
    row = _Row(token_ids, weights.device)
    residual = model.model.embed_tokens(row.tokens_T)
    cos, sin = rotary(model.model.rotary_emb, residual, row)  # type: ignore[arg-type]
    added = torch.zeros_like(residual)
    for layer in map(read_layer, model.model.layers):
        normed, residual = _add_norm(layer.attention_norm, added, residual)
        query, key, value = (
            part.apply(normed)[0].view(len(normed), -1, layer.head_dim)
            for part in (layer.query, layer.key, layer.value)
        )
        if layer.head_norms is not None:
            query, key = (_norm(norm, states) for norm, states in zip(layer.head_norms, (query, key), strict=True))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        parts = (states.transpose(0, 1)[None] for states in (query, key, value))
        out = F.scaled_dot_product_attention(*parts, is_causal=True, scale=layer.scaling, enable_gqa=True)
        added = layer.out.apply(out[0].transpose(0, 1).flatten(1))[0]
        normed, residual = _add_norm(layer.mlp_norm, added, residual)
        gates, up = layer.gate.apply(normed)[0], layer.up.apply(normed)[0]
        added = layer.down.apply((F.silu(gates.float()) * up.float()).to(gates.dtype))[0]
    hidden, _ = _add_norm(read_norm(model.model.norm), added, residual)
    logits = read_projection(model.lm_head).apply(hidden[:-1])[0].float()
    scores: list[float] = logits.log_softmax(-1).gather(1, row.tokens_T[1:, None])[:, 0].tolist()
    return scores


def _add_norm(norm: Norm, added: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = added.float() + residual.float()
    return _norm(norm, total).to(residual.dtype), total.to(residual.dtype)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    return (norm.weight.float() * F.rms_norm(x.float(), x.shape[-1:], None, norm.epsilon)).to(x.dtype)
