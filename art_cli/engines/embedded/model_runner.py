"""ForwardRunner: runs the model on a step plan. Tokens go in, logits come out, keys and values stay in slots.

Layers are computed by MergedDecoder, or else Decoder (both in models/decoder/forward.py), if the decoder knows the
layers and reproduces the model's logprobs on a probe. Otherwise the model computes its layers itself. One-token steps
of large models use Decoder: it multiplies each matrix by a single row, and plain weights do this in two thirds of the
time that packed weights take.

It never queues or schedules requests. The caller holds `weights.lock`, because a learner in the same process may run
and change the model. No gradients are recorded. `no_grad` is used because a learner could
not use tensors from `inference_mode` later.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from art_cli.engines.embedded import attention
from art_cli.engines.embedded.attention import Costs, Layout, RunPlanner, SlotCache
from art_cli.engines.embedded.scheduler import PromptChunk, Shape, StepPlan
from art_cli.models.decoder.forward import Decoder, Gap, MergedDecoder, Unknown, bound_of, matrix_gap, rounded_otherwise
from art_cli.models.weights import Weights, count_parameters
from art_cli.runtime.allocator import memory_size
from art_cli.runtime.errors import EngineError

Tensor = torch.Tensor
DecoderKind = type[MergedDecoder] | type[Decoder]
log = logging.getLogger(__name__)

MEMORY_SHARE = 0.25  # share of a GPU's free memory, measured at engine start, for keys and values
MACHINE_SHARE = 1 / 8  # share of total machine memory for keys and values on the CPU, independent of other programs
SMALL = 8_000_000  # parameters; a second core speeds up 64 tokens 1.1 times with 1M parameters, 1.5 times with 24M
SCORE_ROWS = 512  # rows of logits turned into logprobs at a time
PROBE = 12  # tokens on which a decoder is compared with the model's own layers


class ScoredPart(NamedTuple):
    """Consecutive tokens of a scored sequence."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]  # each position's likeliest tokens: ids and logprobs


class ForwardRunner:
    """The model with its slots. Raises EngineError if the model's layers cannot use slots."""

    def __init__(self, weights: Weights) -> None:
        from transformers import AttentionInterface

        self.weights = weights
        self.cache = SlotCache()
        self._model = weights.inner_model
        _check_supported(self._model)
        AttentionInterface.register(attention.NAME, attention.attend)
        costs = Costs.of(self.bytes_per_token() // self._model.config.num_hidden_layers)
        self._planner = RunPlanner(costs, weights.device)
        self._decoder: MergedDecoder | Decoder | None = None
        self._decoder_version = -1  # weights version of `_decoder`
        self.decoder_kind = next((kind for kind in (MergedDecoder, Decoder) if self._is_right(kind)), None)
        is_large = self.decoder_kind is MergedDecoder and not self.is_small
        self._decodes_one_apart = is_large and self._is_right(Decoder)
        self._of_one: Decoder | None = None  # for one-token steps; built together with `_decoder`
        log.debug("the engine computes with %s", getattr(self.decoder_kind, "__name__", "the model's own layers"))

    def forward(self, plan: StepPlan) -> Tensor:
        """Returns [len(plan.rows), V] float32 logits for the tokens following these rows."""
        with torch.no_grad():
            self.cache.resize(plan.shape)
            self.cache.copy(plan.copies)
            layout = Layout(plan, self._planner.runs(plan), self.cache, self.weights.device)
            rows = torch.from_numpy(plan.rows).to(self.weights.device)
            return self._logits(layout, rows)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns [L - 1] logprobs for every token except the initial one, computed as in sampling, in a new cache."""
        return [logprob for part in self.score_parts(token_ids) for logprob in part.logprobs]

    def score_parts(self, token_ids: Sequence[int], num_top: int = 0) -> Iterator[ScoredPart]:
        """Yields the same with the `num_top` likeliest tokens, SCORE_ROWS tokens at a time.

        The whole prompt's logits would not fit into memory. The caller holds the weights during each part.
        """
        tokens, cache = np.array(token_ids, np.int64), SlotCache()
        for start in range(0, len(tokens) - 1, SCORE_ROWS):
            stop = min(start + SCORE_ROWS, len(tokens) - 1)
            with torch.no_grad():
                layout = self._layout(tokens, start, stop, cache)
                rows = torch.arange(stop - start, device=self.weights.device)
                logprobs = self._logits(layout, rows).log_softmax(-1)
                targets = torch.from_numpy(tokens[start + 1 : stop + 1]).to(logprobs.device)
                values, ids = logprobs.topk(num_top, dim=-1)
                top = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
                part = ScoredPart(logprobs.gather(1, targets[:, None])[:, 0].tolist(), top)
            yield part  # outside no_grad, which applies to the whole thread

    def refresh(self) -> None:
        """Drops the decoders, because weights may change without a new version. The caller holds the weights."""
        self._decoder = None

    def bytes_per_token(self) -> int:
        """Returns the size in bytes of a token's keys and values across layers, from the configuration."""
        config = self._model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers * heads * head_dim * self.weights.dtype.itemsize)

    def token_budget(self) -> int:
        """Returns how many tokens all slots together can hold in their share of memory."""
        if self.weights.device.type == "cuda":
            size = torch.cuda.mem_get_info(self.weights.device)[0] * MEMORY_SHARE
        else:
            size = memory_size() * MACHINE_SHARE
        return int(size) // self.bytes_per_token()

    def _logits(self, layout: Layout, rows: Tensor) -> Tensor:
        if self.decoder_kind is None:
            return self._model_logits(layout, rows)
        decoder = self._current_decoder(self.decoder_kind)
        if self._of_one is not None and len(layout.tokens_T) == 1:
            decoder = self._of_one
        return decoder.logits(layout, rows).float()

    def _model_logits(self, layout: Layout, rows: Tensor) -> Tensor:
        with _attention(self._model):
            output = self._model(
                layout.tokens_T[None],
                position_ids=layout.positions_T[None],
                use_cache=False,
                logits_to_keep=rows,
                layout=layout,
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _current_decoder(self, kind: DecoderKind) -> MergedDecoder | Decoder:
        """Rebuilt after each weight change, because parameters may be new tensors then."""
        if self._decoder is None or self._decoder_version != self.weights.version:
            self._decoder = None  # freed before the rebuild, so two copies never coexist
            self._decoder = kind(self._model)
            self._of_one = Decoder(self._model) if self._decodes_one_apart else None
            self._decoder_version = self.weights.version
        return self._decoder

    @property
    def is_small(self) -> bool:
        """Whether the matrix products are so small that a CPU's other cores are better left to clients."""
        return self.weights.device.type == "cpu" and count_parameters(self._model).whole < SMALL

    def _is_right(self, kind: DecoderKind) -> bool:
        """Returns True if this decoder knows the model and reproduces its logprobs within rounding."""
        tokens = np.arange(PROBE) * 37 % self._model.config.vocab_size
        rows = torch.arange(PROBE, device=self.weights.device)
        try:
            with torch.no_grad(), self.weights.lock:
                found = kind(self._model).logits(self._whole(tokens), rows).float().log_softmax(-1)
                own = self._model_logits(self._whole(tokens), rows).log_softmax(-1)
        except (Unknown, RuntimeError) as error:  # RuntimeError: torch lacks a kernel for this processor
            log.debug("%s is not used: %s", kind.__name__, error)
            return False
        gap = matrix_gap(found, own)
        bound = bound_of(self.weights.dtype, gap, lambda: self._rounding(tokens, rows, own))
        if gap.is_within(bound):
            return True
        log.warning("%s differs by %.2g nats from the model's own layers; it is not used", kind.__name__, gap.logprob)
        return False

    def _rounding(self, tokens: Any, rows: Tensor, own: Tensor) -> Gap:
        """Returns the gap in the model's logprobs `own` caused by rounding alone."""
        with torch.no_grad(), self.weights.lock, rounded_otherwise(self._model, self.weights.dtype):
            return matrix_gap(own, self._model_logits(self._whole(tokens), rows).log_softmax(-1))

    def _whole(self, tokens: Any) -> Layout:
        """Returns a layout for one whole sequence in a new cache."""
        return self._layout(tokens, 0, len(tokens), SlotCache())

    def _layout(self, tokens: Any, start: int, stop: int, cache: SlotCache) -> Layout:
        """Returns a layout for some tokens of a sequence whose earlier tokens are in `cache`."""
        none, positions = np.empty(0, np.int64), np.arange(start, stop)
        plan = StepPlan(
            shape=Shape(1, len(tokens)),
            copies=[],
            decodes=none,
            shared=none,
            chunks=[PromptChunk(0, start, stop - start, True)],
            tokens_T=tokens[start:stop],
            slots_T=np.zeros_like(positions),
            positions_T=positions,
            rows=none,
            slots=none,
            num_sampled=none,
            placed=[],
        )
        cache.resize(plan.shape)
        return Layout(plan, [], cache, self.weights.device)


@contextlib.contextmanager
def _attention(model: Any) -> Iterator[None]:
    """Inside, the model's attention reads slots. The previous attention is restored afterwards for the learner."""
    before = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _check_supported(model: Any) -> None:
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"the embedded engine cannot run {name}: its attention cannot be replaced")
    modules = (getattr(module.forward, "__module__", None) or "" for module in model.modules())
    if foreign := next((module for module in modules if module.startswith("unsloth")), ""):
        raise EngineError(
            f"the embedded engine cannot run {name} with the attention of {foreign} in it: "
            "set engine=vllm, or learner=torch"
        )
    kinds = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise EngineError(f"the embedded engine cannot run {name}: it has layers of kind {', '.join(sorted(kinds))}")
