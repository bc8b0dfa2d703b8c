"""LettersPolicy: the wide letters model in this process, with two checkpoints, to hold a server's answers against."""

import sys
from pathlib import Path

import torch

from art_cli.config.schema import LoraConfig, ModelConfig
from art_cli.models.loading import load_weights
from art_cli.models.saved_weights import load_checkpoint, save_weights
from art_cli.models.weights import Weights
from tests.support.paths import LETTERS


class LettersPolicy:
    """Weights with a LoRA adapter, and the checkpoints "a" and "b" of other adapters."""

    def __init__(self, directory: Path) -> None:
        sys.path.insert(0, str(LETTERS))
        from build import build_wide

        base = directory / "base"
        build_wide(base)
        config = ModelConfig(base=str(base), lora=LoraConfig(rank=4, alpha=8))
        self.weights: Weights = load_weights(config, str(base), device="cpu")
        self.checkpoints = {name: self._make(directory / name, seed) for seed, name in enumerate("ab", 1)}

    def _make(self, path: Path, seed: int) -> Path:
        """A checkpoint with an adapter that changes every logit."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.weights.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        save_weights(self.weights, path)
        return path

    def take(self, name: str) -> None:
        """Scores as that checkpoint does from here on."""
        load_checkpoint(self.weights, self.checkpoints[name])

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[L, V] by one plain forward."""
        with torch.no_grad():
            logits: torch.Tensor = self.weights.model(torch.tensor([ids])).logits[0].float()
        return logits

    def score(self, ids: list[int]) -> list[float]:
        rows = self.logits(ids).log_softmax(-1)[:-1]
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
