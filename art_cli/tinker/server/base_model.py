"""Base: the base model shared by all clients' adapters, loaded once, with shared facts."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.chat_errors import invalid
from art_cli.config.schema import LoraConfig
from art_cli.learners.probe import measure_probe
from art_cli.models.adapters import on_base, with_adapter
from art_cli.models.saved_weights import load_checkpoint
from art_cli.models.weights import Weights, clone_trainable, token_logprobs
from art_cli.runs.manifest import Probe
from art_cli.tinker.server.adapter_learner import AdapterLearner
from art_cli.tinker.server.adapter_pool import AdapterReplicas, ReplicatedAdapter

ClientLearner = AdapterLearner | ReplicatedAdapter  # trains a client's weights in this process, or in several
ALPHA = 32  # default adapter scale, independent of the rank
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2")


class Parts(NamedTuple):
    """The adapted layers of a model. The head is never adapted, even on request."""

    attention: bool = True
    mlp: bool = True


class Base:
    """`name` is the model's name for clients; `names` are accepted alternatives.

    `lora` is the default adapter shape; None uses the protocol's default. `is_whole`: each client trains a copy of all
    weights instead of an adapter.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        name: str,
        lora: LoraConfig | None,
        learner: Any,
        is_whole: bool = False,
        chat_template: Path | None = None,
    ) -> None:
        self.weights, self.name, self.is_whole = weights, name, is_whole
        self.names = {name, weights.base}
        self._lora, self._learner, self._chat_template = lora, learner, chat_template
        self.vocabulary = weights.vocabulary
        self.max_length = weights.max_length
        self.replicas: AdapterReplicas | None = None  # training processes; None if this process trains
        self._probe: Probe | None = None

    def probe(self) -> Probe:
        """Returns the base model's probe. All policies are proven on its tokens. Computed on the first call."""
        if self._probe is None:
            own = measure_probe(self.weights, partial(token_logprobs, self.weights))
            self._probe = msgspec.structs.replace(own, base=own.logprobs, base_rounded=own.rounded)
        return self._probe

    def start(self, logs: Path) -> None:
        """Starts the learner's processes, if it has several. Raises LearnerError on failure."""
        if self._learner.name == "torch" and self._learner.processes > 1:
            self.replicas = AdapterReplicas(self.weights, self._learner, chat_template=self._chat_template, logs=logs)
            self.replicas.start()

    def check_alive(self) -> None:
        """Raises LearnerError if a learner process is dead."""
        if self.replicas is not None:
            self.replicas.check()

    def close(self) -> None:
        if self.replicas is not None:
            self.replicas.close()

    def check(self, name: str | None) -> None:
        """Raises ChatError 400 for other model names."""
        if name is not None and name not in self.names:
            raise invalid(f"base_model {name[:200]!r}: this server has {self.name!r}")

    def new_learner(self, rank: int, seed: int, parts: Parts) -> ClientLearner:
        """Returns a learner for a new adapter. Raises UsageError if the model lacks a layer to adapt."""
        if self.is_whole:
            return self._make(None, seed)
        alpha = self._lora.alpha if self._lora is not None else ALPHA
        return self._make(LoraConfig(rank=rank, alpha=alpha, targets=self._targets(parts)), seed)

    def saved_learner(self, adapter: Path) -> ClientLearner:
        """Returns a learner shaped like a saved adapter. The caller loads the tensors."""
        return self._make(None if self.is_whole else lora_of(adapter), 0)

    def _make(self, lora: LoraConfig | None, seed: int) -> ClientLearner:
        """Returns a learner for a new adapter, or for a copy of all weights."""
        if self.replicas is not None:
            return self.replicas.new_adapter(lora, seed, self.policy)
        own = clone_trainable(self.weights) if lora is None else with_adapter(self.weights, lora, seed)
        return AdapterLearner(own, self._learner)

    def policy(self, adapter: Path | None) -> Weights:
        """Returns the base model, optionally with a saved adapter."""
        if self.is_whole and adapter is not None:
            weights = clone_trainable(self.weights)
            load_checkpoint(weights, adapter)
            return weights
        return on_base(self.weights, adapter)

    def _targets(self, parts: Parts) -> str | list[str]:
        if parts.attention and parts.mlp:
            return "all-linear" if self._lora is None else self._lora.targets
        if not (parts.attention or parts.mlp):
            raise invalid("train_attn and train_mlp are both false; the head alone is not trained here")
        wanted = ATTENTION if parts.attention else MLP
        there = {name.rpartition(".")[2] for name, _ in self.weights.model.named_modules()}
        if not (found := sorted(there.intersection(wanted))):
            raise invalid("this model's layers have unusual names; train_attn and train_mlp go together here")
        return found


def lora_of(adapter: Path) -> LoraConfig:
    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_bytes())
    targets = config["target_modules"]
    return LoraConfig(
        rank=config["r"], alpha=config["lora_alpha"], targets=targets if isinstance(targets, str) else sorted(targets)
    )


def parts_of(lora: LoraConfig) -> Parts:
    if isinstance(lora.targets, str):
        return Parts()
    return Parts(any(name in ATTENTION for name in lora.targets), any(name in MLP for name in lora.targets))
