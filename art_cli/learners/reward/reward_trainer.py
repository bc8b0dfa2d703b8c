"""RewardTrainer: learns a scalar score of a conversation from preferences, and writes it for `judge: reward_model`.

    pair      -log sigmoid(r_better - r_worse)                                  Bradley and Terry 1952
    value v   -v log sigmoid(r) - (1 - v) log sigmoid(-r), v in [0, 1]

r is a linear function of the last hidden state after the conversation's last token. The trained parts are the adapter
and this head. A conversation longer than the model's context keeps its last tokens. The written model is
transformers' sequence classification with one output, with the adapter merged, so it needs no base.

TRL's RewardTrainer has the same pair loss. It is not used, because it makes two padded rows of each pair: 8 attempts
have 28 pairs, so each attempt is computed 7 times, with the common prompt. These packs compute each attempt once, and
the prompt once per group. TRL has no single values either, and art would need trl, accelerate and datasets to run.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from art_cli.config.schema import BaseLearnerConfig, ModelConfig, TrainConfig
from art_cli.config.sections.reward_config import RewardConfig
from art_cli.judges.reward_model import conversation_ids
from art_cli.learners.learning_rate import choose_rate
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.logprob_reader import Reader
from art_cli.learners.packs.pack_runner import PackRunner, ValueHead
from art_cli.learners.packs.packing import Pack
from art_cli.learners.reward.preferences import PreferenceGroup
from art_cli.learners.samples import Sample, bare_sample
from art_cli.models.adapters import merge
from art_cli.models.base_source import hide_progress_bars, loading
from art_cli.models.model_shape import width_of
from art_cli.models.weights import Weights
from art_cli.runtime.errors import LearnerError, UsageError
from art_cli.runtime.log import Bar

Scores = list[list[float]]  # one list per group, one score per attempt


class RewardTrainer:
    """Trains `weights` with a fresh adapter. Raises UsageError if the architecture has no sequence classification."""

    def __init__(self, weights: Weights, model: ModelConfig, learner: BaseLearnerConfig, config: RewardConfig) -> None:
        self.weights, self.learner, self.config = weights, learner, config
        self.rate = config.learning_rate or choose_rate(width_of(weights.model.config), model.lora)[0]
        self._classifier = _empty_classifier(weights)
        tokenizer = weights.tokenizer
        self.max_length = min(weights.max_length, tokenizer.model_max_length or weights.max_length) - 1
        self.head = ValueHead(width_of(weights.model.config), moves_trunk=True, device=weights.device)
        self.head.bias.requires_grad_(False)  # classification heads have none
        self._use(weights)

    def _use(self, weights: Weights) -> None:
        self.runner = PackRunner(weights, self.learner)
        self.runner.value_head = self.head
        self.reader = Reader(self.runner)

    def samples(self, groups: Sequence[PreferenceGroup]) -> list[list[Sample]]:
        """Returns each attempt's tokens, per group, followed by one token that is predicted and never read.

        Raises JudgeError if the chat template refuses a conversation.
        """
        return [[self._sample(group, each) for each in group.conversations] for group in groups]

    def _sample(self, group: PreferenceGroup, conversation: Any) -> Sample:
        ids = conversation_ids(self.weights.tokenizer, conversation, self.max_length, name=group.name)
        return bare_sample(np.array([*ids, 0], dtype=np.int64), np.array([len(ids)]), group.name)

    def train(self, groups: Sequence[PreferenceGroup], *, progress: Bar | None = None) -> float:
        """Trains all epochs. Returns the last epoch's mean loss. Raises LearnerError if it is not finite."""
        samples, config = self.samples(groups), self.config
        num_epoch = -(-len(groups) // config.groups_per_update)
        num_updates, losses = config.epochs * num_epoch, list[float]()
        optimizers = self._optimizers(num_updates)
        self.reader.packing.probe(samples[0][0])
        for epoch in range(config.epochs):
            order, losses = np.random.default_rng([config.seed % 2**64, epoch]).permutation(len(groups)), []
            for start in range(0, len(order), config.groups_per_update):
                chosen = order[start : start + config.groups_per_update]
                losses.append(self._learn([groups[at] for at in chosen], [samples[at] for at in chosen]))
                for optimizer in optimizers:
                    if not math.isfinite(losses[-1] + optimizer.clip()):
                        raise LearnerError("reward: the loss is not finite; lower reward.learning_rate")
                    optimizer.update()
                    optimizer.counts.num_steps += 1
                if progress is not None:
                    progress(epoch * num_epoch + len(losses), num_updates, f"loss {np.mean(losses):.3f}")
        self._settle()
        return float(np.mean(losses))

    def _optimizers(self, num_updates: int) -> list[Optimizer]:
        trained = {name: p for name, p in self.weights.model.named_parameters() if p.requires_grad}
        chosen = (trained, self.rate), ({"weight": self.head.weight}, self.config.head_learning_rate)
        return [
            Optimizer(parameters, TrainConfig(steps=num_updates, decay="linear", learning_rate=rate))
            for parameters, rate in chosen
        ]

    def _learn(self, groups: Sequence[PreferenceGroup], samples: Sequence[Sequence[Sample]]) -> float:
        """Adds the gradient of these groups' mean loss, and returns the loss. One pack's activations are in memory.

        With several packs, scores are computed first without gradient, because a pair may be in two packs.
        """
        flat = [sample for each in samples for sample in each]
        with self.runner.running():
            packs = self.runner.pack(flat)
            with torch.set_grad_enabled(len(packs) == 1):
                found = [self._scores(pack) for pack in packs]
            places = {id(sample): at for at, sample in enumerate(sample for pack in packs for sample in pack.samples)}
            scores = torch.cat(found).detach().requires_grad_()
            loss = preference_loss(groups, scores[[places[id(sample)] for sample in flat]])
            [slopes] = torch.autograd.grad(loss, scores)
            for pack, known, slope in zip(
                packs, found, torch.split(slopes, [len(each) for each in found]), strict=True
            ):
                again = known if len(packs) == 1 else self._scores(pack)
                (again * slope).sum().backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _scores(self, pack: Pack) -> Tensor:
        """Returns [samples] scores in the pack's order."""
        values = self.runner.run(pack).values
        assert values is not None, "the runner has a head"
        return values[torch.from_numpy(pack.terms.edges).to(values.device)]

    def score(self, groups: Sequence[PreferenceGroup]) -> Scores:
        """Returns the scores of all attempts."""
        samples = self.samples(groups)
        found = iter(self.reader.values([sample for each in samples for sample in each]))
        return [[float(next(found)[0]) for _ in each] for each in samples]

    def _settle(self) -> None:
        """Merges the adapter and rounds the head, and later scores are the written model's."""
        self.weights = merge(self.weights)
        made = torch.nn.Linear(len(self.head.weight), 1, bias=False, dtype=self.weights.dtype)
        with torch.no_grad():
            made.weight.copy_((self.head.weight * self.head.scale)[None])
            self.head.weight.copy_(made.weight[0].float() / self.head.scale)
        self._classifier.score = made
        setattr(self._classifier, self._classifier.base_model_prefix, self.weights.model.base_model)
        self._use(self.weights)

    def save(self, directory: Path) -> None:
        """Writes the trained model and its tokenizer."""
        hide_progress_bars()
        tokenizer = copy.copy(self.weights.tokenizer)
        tokenizer.model_max_length = self.max_length
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self._classifier.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def preference_loss(groups: Sequence[PreferenceGroup], scores: Tensor) -> Tensor:
    """Returns the mean loss over all pairs, plus the mean over all values. `scores` has all attempts, group by group.

    One mean over both would drown the pairs in the more frequent values, which tell easy scenarios from hard ones.
    """
    pairs, values, start = list[Tensor](), list[Tensor](), 0
    for group in groups:
        own = scores[start : start + len(group.ids)]
        start += len(group.ids)
        if group.pairs:
            pairs.append(-logsigmoid(own[[p.better for p in group.pairs]] - own[[p.worse for p in group.pairs]]))
        if group.values:
            known = torch.tensor([*group.values.values()], dtype=own.dtype, device=own.device)
            values.append(binary_cross_entropy_with_logits(own[[*group.values]], known, reduction="none"))
    return torch.stack([torch.cat(losses).mean() for losses in (pairs, values) if losses]).sum()


def _empty_classifier(weights: Weights) -> Any:
    """Returns the architecture's sequence classification without tensors."""
    import transformers

    model = weights.inner_model
    config, pad, end = copy.deepcopy(model.config), weights.tokenizer.pad_token_id, weights.tokenizer.eos_token_id
    config.num_labels, config.pad_token_id = 1, end if pad is None else pad
    with loading(weights.base, f"the base model {weights.base}"), torch.device("meta"):
        kind: Any = transformers.AutoModelForSequenceClassification
        made = kind.from_config(config, dtype=weights.dtype)
    if type(made.base_model) is not type(model.base_model) or not isinstance(
        getattr(made, "score", None), torch.nn.Linear
    ):
        name = type(model).__name__
        raise UsageError(f"{name} has no sequence classification with the same layers; name another with --base")
    return made
