"""ModelRunner: the model run on a step's plan, tokens in, logits out, keys and values kept in slots.

The decoder room computes the layers where it knows them and a probe gives the model's own logprobs: MergedDecoder,
else Decoder (both in models/decoder/forward.py). Otherwise the model computes them itself. A large model's step of one
token is Decoder's: it multiplies each matrix by one row, which takes plain weights two thirds of the time of packed
ones.

It holds no queue and decides nothing about requests. The caller holds `weights.lock`, so that a learner in the same
process does not run or change the model meanwhile. No gradients are recorded. It uses `no_grad`, because tensors of
`inference_mode` could not be used by a learner later.
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
from art_cli.models.loading import Weights, count_parameters
from art_cli.runtime.allocator import memory_size
from art_cli.runtime.errors import EngineError

Tensor = torch.Tensor
DecoderKind = type[MergedDecoder] | type[Decoder]
log = logging.getLogger(__name__)

MEMORY_SHARE = 0.25  # share of a GPU's free memory, at the engine's start, that keys and values may take
MACHINE_SHARE = 1 / 8  # share of the machine's memory, where they are in it; what else runs there changes nothing
SMALL = 8_000_000  # parameters; a second core makes 64 tokens 1.1 times faster with 1M of them, 1.5 times with 24M
SCORE_ROWS = 512  # number of rows of logits turned into logprobs at a time
PROBE = 12  # number of tokens on which a decoder is compared with the model's own layers


class ScoredPart(NamedTuple):
    """Successive tokens of a given sequence."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]  # the likeliest tokens in place of each: ids and logprobs


class ForwardRunner:
    """The model with its slots. Raises EngineError for a model whose layers cannot keep their past in slots."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.cache = SlotCache()
        self._model = weights.model.get_base_model() if weights.has_adapter else weights.model
        _check_supported(self._model)
        _register()
        costs = Costs.of(self.bytes_per_token() // self._model.config.num_hidden_layers)
        self._planner = RunPlanner(costs, weights.device)
        self._decoder: MergedDecoder | Decoder | None = None
        self._decoder_version = -1  # version of the weights when `_decoder` was made
        self.decoder_kind = next((kind for kind in (MergedDecoder, Decoder) if self._is_right(kind)), None)
        is_large = self.decoder_kind is MergedDecoder and not self.is_small
        self._decodes_one_apart = is_large and self._is_right(Decoder)
        self._of_one: Decoder | None = None  # made with `_decoder`
        log.debug("the engine computes with %s", getattr(self.decoder_kind, "__name__", "the model's own layers"))

    def forward(self, plan: StepPlan) -> Tensor:
        """Returns [len(plan.rows), V] float32 logits of the token after each of those rows."""
        with torch.no_grad():
            self.cache.resize(plan.shape)
            self.cache.copy(plan.copies)
            layout = Layout(plan, self._planner.runs(plan), self.cache, self.weights.device)
            rows = torch.from_numpy(plan.rows).to(self.weights.device)
            return self._logits(layout, rows)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Returns [L - 1] logprobs of each token after the first, computed as in sampling, in a new cache."""
        return [logprob for part in self.score_parts(token_ids) for logprob in part.logprobs]

    def score_parts(self, token_ids: Sequence[int], num_top: int = 0) -> Iterator[ScoredPart]:
        """Yields the same with the `num_top` likeliest tokens, SCORE_ROWS tokens at a time, so that a long prompt needs
        no matrix of the vocabulary's width for all of them. The caller holds the weights during each part."""
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
            yield part  # outside of no_grad, which holds for a thread

    def refresh(self) -> None:
        """Drops what was made of the weights, which may have changed under the same version. The caller holds them."""
        self._decoder = None

    def bytes_per_token(self) -> int:
        """Size of one token's keys and values in all layers, by the configuration."""
        config = self._model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * int(config.num_hidden_layers * heads * head_dim * self.weights.dtype.itemsize)

    def token_budget(self) -> int:
        """Returns the number of tokens of all slots together that fit into a share of the memory."""
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
        """Made again after each change of the weights, because parameters may be other tensors then."""
        if self._decoder is None or self._decoder_version != self.weights.version:
            self._decoder = None  # freed first, so that there are never two copies
            self._decoder = kind(self._model)
            self._of_one = Decoder(self._model) if self._decodes_one_apart else None
            self._decoder_version = self.weights.version
        return self._decoder

    @property
    def is_small(self) -> bool:
        """Returns whether the model's products are so small that a CPU's other cores are better left to the clients."""
        return self.weights.device.type == "cpu" and count_parameters(self._model).whole < SMALL

    def _is_right(self, kind: DecoderKind) -> bool:
        """Returns whether a decoder of that kind knows this model and gives its logprobs within rounding."""
        tokens = np.arange(PROBE) * 37 % self._model.config.vocab_size
        rows = torch.arange(PROBE, device=self.weights.device)
        try:
            with torch.no_grad(), self.weights.lock:
                found = kind(self._model).logits(self._whole(tokens), rows).float().log_softmax(-1)
                own = self._model_logits(self._whole(tokens), rows).log_softmax(-1)
        except (Unknown, RuntimeError) as error:  # RuntimeError: torch has no such product on this processor
            log.debug("%s is not used: %s", kind.__name__, error)
            return False
        gap = matrix_gap(found, own)
        bound = bound_of(self.weights.dtype, gap, lambda: self._rounding(tokens, rows, own))
        if gap.is_within(bound):
            return True
        log.warning("%s differs by %.2g nats from the model's own layers; it is not used", kind.__name__, gap.logprob)
        return False

    def _rounding(self, tokens: Any, rows: Tensor, own: Tensor) -> Gap:
        """Returns the gap that rounding alone makes in the model's logprobs `own`."""
        with torch.no_grad(), self.weights.lock, rounded_otherwise(self._model, self.weights.dtype):
            return matrix_gap(own, self._model_logits(self._whole(tokens), rows).log_softmax(-1))

    def _whole(self, tokens: Any) -> Layout:
        """Returns a layout for one whole sequence, in a new cache."""
        return self._layout(tokens, 0, len(tokens), SlotCache())

    def _layout(self, tokens: Any, start: int, stop: int, cache: SlotCache) -> Layout:
        """Returns a layout for some tokens of one sequence, whose earlier tokens are in `cache`."""
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
    """The model's attention reads slots while inside. Afterwards it is again what it was, for a learner's sake."""
    before = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.attend)


def _check_supported(model: Any) -> None:
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"the embedded engine cannot run {name}: its attention cannot be replaced")
    if (foreign := _replaced_forward(model)) is not None:
        raise EngineError(
            f"the embedded engine cannot run {name} with the attention of {foreign} in it: "
            "set engine=vllm, or learner=torch"
        )
    kinds = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise EngineError(f"the embedded engine cannot run {name}: it has layers of kind {', '.join(sorted(kinds))}")


def _replaced_forward(model: Any) -> str | None:
    """Returns the Unsloth module whose code replaces the model's own, or None."""
    modules = (getattr(module.forward, "__module__", None) or "" for module in model.modules())
    return next((module for module in modules if module.startswith("unsloth")), None)
