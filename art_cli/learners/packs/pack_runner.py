"""PackRunner: logprobs for a pack's edges, with or without gradients. ValueHead: the matching critic values.

Two ways compute the same numbers. The packed way runs the model's layers once over the row, with tree attention, and
the head on predicting positions only; it requires causal softmax attention and a head. The plain way runs the
unmodified model on one sample at a time. packing_check.py compares both and decides which way a model uses.

The value head is a linear layer that maps the policy's last hidden state to a critic's value, in float32.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_cli.config.schema import BaseLearnerConfig
from art_cli.learners.packs.flex_attention import FlexAttention
from art_cli.learners.packs.logprobs import TokenScores, token_scores
from art_cli.learners.packs.packing import Pack, pack_small, reuse
from art_cli.learners.packs.ranks import Ranks, deal, pack_evenly
from art_cli.learners.packs.tree_attention import Tree, attend, padded, tree_attention
from art_cli.learners.samples import Ints, Sample
from art_cli.models.decoder.layers import known_layers
from art_cli.models.decoder.maths import is_shape_costly
from art_cli.models.run_memory import GPU_TOKENS
from art_cli.models.weights import Weights, count_parameters
from art_cli.runtime import openmp
from art_cli.runtime.errors import LearnerError

log = logging.getLogger(__name__)
# Default tokens per pack. On a CPU this is the smallest budget: larger packs, up to twice the longest sample, are used
# where trees would be cut and their stems computed again. Measured with a 24M-parameter Qwen3 and 9,728 tokens per
# step: 8192 takes 17.4 s of CPU time, 2048 12.4 s, 1024 11.7 s, because larger packs do not fit into the caches.
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": GPU_TOKENS}
# Minimum ratio of row tokens to tree tokens for using trees, because each shared span costs a second attention.
# Measured with 1M and 24M parameters: trees are 3 to 12 % slower at 1.01, equal at 1.03, 7 % faster at 1.13.
WORTH = 1.04
# Below this parameter count, a CPU trains with one thread per pack and several packs side by side, because the matrix
# products are too small to divide. The demo's warm-up (1.2M parameters, two cores), when divided, takes 0.9 times the
# one-thread time on an idle machine and 1.5 times next to three busy processes (python -m benchmarks.speed.busy). The
# demo's updates take 2.9 s with one thread, 3.2 s divided, and 1.7 to 2.3 s with two packs side by side.
SMALL = 2_000_000


class ValueHead(torch.nn.Module):
    """V(s) = w . h / sqrt(H) + b for a state whose last token has hidden state h [H], in units of the reward.

    It starts at zero. Hidden states have entries of about 1 at any width, so without the division early updates would
    move a wide model's values much further than a narrow model's.
    """

    def __init__(self, width: int, *, moves_trunk: bool, device: torch.device) -> None:
        """`moves_trunk`: whether value gradients also flow into the policy's weights."""
        super().__init__()
        self.moves_trunk, self.scale = moves_trunk, width**-0.5
        self.weight = torch.nn.Parameter(torch.zeros(width, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [E] values for states whose last tokens have `hidden` states [E, H] in any dtype."""
        seen = hidden if self.moves_trunk else hidden.detach()
        values: Tensor = (seen.float() * self.scale) @ self.weight + self.bias
        return values

    @torch.no_grad()
    def reset(self) -> None:
        """Resets the head to zero."""
        for parameter in self.parameters():
            parameter.zero_()


class PackRunner:
    """Scores pack edges with the current weights. Use inside `running()`."""

    def __init__(self, weights: Weights, config: BaseLearnerConfig, ranks: Ranks | None = None) -> None:
        """`ranks` are the processes that share the packs (default: this process only)."""
        self.weights, self.config = weights, config
        self.ranks = ranks or Ranks()
        self.micro_batch_tokens = config.micro_batch_tokens or MICRO_BATCH_TOKENS.get(weights.device.type, 1024)
        self.model = weights.inner_model
        self._is_small = weights.device.type == "cpu" and count_parameters(weights.model).whole < SMALL
        self.can_pack: bool | None = None  # None before packing_check.py has decided
        self.value_head: ValueHead | None = None  # set by a critic; scores then include values
        self.flex = FlexAttention(self.micro_batch_tokens) if weights.device.type == "cuda" else None
        if config.gradient_checkpointing not in (False, "auto"):
            _enable_checkpointing(self.model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Locks the weights inside the block and switches the model's layers to pack attention."""
        with self.weights.lock, contextlib.ExitStack() as stack:
            if self._is_small:
                stack.enter_context(openmp.single_threaded())
            if self.can_pack:
                stack.enter_context(tree_attention(self.model))
                stack.enter_context(known_layers(self.model, attend))
            yield

    def decide(self, can_pack: bool, reason: str) -> None:
        """Uses packs from now on, or plain rows, logging the reason."""
        self.can_pack = can_pack
        if not can_pack:
            log.warning("%s; training one sample at a time, slower", reason)

    def using_packs(self, can_pack: bool) -> "PackRunner":
        """Returns a runner for the same policy, either packed or as plain rows with minimal backward memory.

        A model's unmodified layers keep several times what packs keep, and a comparison must not set a step's peak
        memory.
        """
        other = copy.copy(self)
        other.can_pack = can_pack
        if not can_pack and torch.is_grad_enabled():
            other.config = self.config.model_copy(update={"gradient_checkpointing": True})
            _enable_checkpointing(self.model)
        return other

    def pack(self, samples: Sequence[Sample], *, share: bool | None = None) -> list[Pack]:
        """Returns packs for `run`. `share` builds trees; by default, configuration and samples decide."""
        if share is None:
            share = self._shares(samples)
        return pack_small(samples, budgets=self._budgets(samples), share=share)

    def _shares(self, samples: Sequence[Sample]) -> bool:
        """Returns whether the samples' shared tokens are computed once."""
        assert self.can_pack is not None, "PackingCheck.probe comes first"
        if not self.can_pack or self.config.packing == "rows":
            return False
        return self.config.packing == "tree" or reuse(samples) >= WORTH

    def _budgets(self, samples: Sequence[Sample]) -> list[int]:
        """Returns allowed pack sizes in tokens, ascending."""
        if self.can_pack is False:
            return [1]  # one row, because all plain rows in a pack have their full logits in memory together
        budgets = [self.micro_batch_tokens]
        if self.config.micro_batch_tokens is None and self.weights.device.type == "cpu":
            longest = max((len(sample.token_ids) for sample in samples), default=0)
            while budgets[-1] < 2 * longest:
                budgets.append(2 * budgets[-1])
        return budgets

    def deal(self, samples: Sequence[Sample]) -> list[Pack]:
        """Returns the packs assigned to this process."""
        if self.ranks.size == 1:
            return self.pack(samples)
        share = self._shares(samples)
        # packs with a single plain row also give all processes equal numbers of passes
        packs = pack_evenly(samples, self.ranks.size, budget=self._budgets(samples)[0], share=share)
        return deal(packs, self.ranks.rank, self.ranks.size)

    def is_side_by_side(self, packs: Sequence[Pack]) -> bool:
        """Returns whether these packs can run in several threads, and should, because the model is small."""
        is_apart = self.ranks.size == 1 and self.can_pack is True and not any(map(self._checkpoints, packs))
        return self._is_small and is_apart

    def run(self, pack: Pack) -> TokenScores:
        """Returns [E] scores for the pack's edges."""
        with contextlib.ExitStack() as stack:
            if self._checkpoints(pack):
                stack.enter_context(_checkpointing_layers(self.model))
            if not self.can_pack:
                return self._run_plain(pack)
            return self.ranks.forward(self.model, self._run_packed, pack)

    def _checkpoints(self, pack: Pack) -> bool:
        """Returns whether the backward pass recomputes the pack's activations instead of keeping them."""
        setting = self.config.gradient_checkpointing
        return isinstance(setting, int) and bool(setting) and len(pack.token_ids) >= setting and torch.is_grad_enabled()

    def _run_packed(self, pack: Pack) -> TokenScores:
        backbone = self.model.base_model
        if self.weights.device.type == "cpu" and is_shape_costly(self.weights.dtype):
            pack = padded(pack)
        tree = Tree.of(pack, self.weights.device, self.flex)
        output = backbone(
            input_ids=self._tensor(pack.token_ids)[None],
            position_ids=self._tensor(pack.depths)[None],
            tree=tree,
            use_cache=False,
        )
        hidden = output.last_hidden_state[0]  # [T, H], or only `tree.rows` (models/decoder/layers.py)
        positions = self._tensor(pack.edges.positions)
        if len(hidden) == len(tree.rows):
            positions = torch.searchsorted(tree.rows, positions)
        hidden = hidden[positions]  # [E, H]
        scores = self._score(hidden, self.model.get_output_embeddings(), pack)
        return scores if self.value_head is None else scores._replace(values=self.value_head(hidden))

    def _run_plain(self, pack: Pack) -> TokenScores:
        starts, ends, _, parents = pack.segments
        assert all(parent < 0 for parent in parents), "a shared pack cannot be run one sample at a time"
        # the ascending positions, split at the row boundaries
        by_row = np.split(pack.edges.positions, np.searchsorted(pack.edges.positions, starts[1:]))
        rows = [
            self._run_row(pack.token_ids[start:end], positions - start)
            for start, end, positions in zip(starts, ends, by_row, strict=True)
        ]
        logits = rows[0][0] if len(rows) == 1 else torch.cat([logits for logits, _ in rows])
        # the inputs are already logits, so the head only copies them
        scores = self._score(logits, torch.clone, pack)
        if self.value_head is None:
            return scores
        return scores._replace(values=self.value_head(torch.cat([hidden for _, hidden in rows])))

    def _run_row(self, token_ids: Ints, positions: Ints) -> tuple[Tensor, Tensor]:
        """Runs the whole unmodified model on one sequence. Returns logits [len(positions), V] and last hidden states.

        The hidden states are [len(positions), H] if there is a value head, otherwise empty.
        """
        first = int(positions.min())
        with contextlib.ExitStack() as stack:
            hidden = [] if self.value_head is None else stack.enter_context(_head_input(self.model))
            output = self.model(
                input_ids=self._tensor(token_ids)[None], use_cache=False, logits_to_keep=len(token_ids) - first
            )
        chosen = self._tensor(positions - first)
        logits: Tensor = output.logits[0, chosen]
        if self.value_head is None:
            return logits, logits[:, :0]
        if len(hidden) != 1 or hidden[0].shape[:2] != output.logits.shape[:2]:
            name = type(self.model).__name__
            raise LearnerError(f"{name} hides the hidden states that a value head needs: choose another loss")
        return logits, hidden[0][0, chosen]

    def _score(self, hidden: Tensor, head: Any, pack: Pack) -> TokenScores:
        temperatures = torch.from_numpy(pack.edges.temperatures).float()
        targets = self._tensor(pack.edges.targets)
        return token_scores(hidden, head, targets, temperatures)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.weights.device)


@contextlib.contextmanager
def _head_input(model: Any) -> Iterator[list[Tensor]]:
    """Collects the inputs of the model's output head inside the block: last hidden states [1, n, H]."""
    inputs: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, given: inputs.append(given[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def _enable_checkpointing(model: Any) -> None:
    # transformers 5.23 renamed it and warns under the old name; drop the fallback when 5.23 is the floor
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextlib.contextmanager
def _checkpointing_layers(model: Any) -> Iterator[None]:
    """Puts checkpointing layers into training mode, as checkpointing requires, but not their dropout modules."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
