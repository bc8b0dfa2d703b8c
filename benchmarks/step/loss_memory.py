"""Memory and time of the loss part alone, with a vocabulary of 151,936: in chunks against the whole matrix, in turn.

    python -m benchmarks.step.loss_memory [--repeats 5]

Figure 3: T = 4,096 positions, hidden size 256, a frozen linear head, float32. A step is logprobs and entropies of all
positions and the backward pass to the hidden states. The whole-matrix form is log_softmax over [T, V].
"""

import argparse
from typing import Any

from benchmarks.shared.sides import Memory, Row, Side, in_turn, median, seconds, table

T, HIDDEN, VOCABULARY = 4096, 256, 151_936
LIMIT_MB, LIMIT_TIME = 600, 1.15


class Part:
    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
        self.hidden = torch.randn(T, HIDDEN).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (T,))
        self.weight = torch.randn(T)
        self.memory = Memory()

    def step(self) -> None:
        self.hidden.grad = None
        logprobs, _ = self.scores()
        (logprobs * self.weight).sum().backward()

    def scores(self) -> tuple[Any, Any]:
        """[T] logprobs and entropies."""
        raise NotImplementedError

    def peak(self) -> float:
        return self.memory.peak()

    def gradient(self) -> Any:
        self.step()
        return self.hidden.grad.numpy()


class Chunks(Part):
    def scores(self) -> tuple[Any, Any]:
        import torch

        from art_cli.learners.packs.logprobs import token_scores

        scores = token_scores(self.hidden, self.head, self.targets, torch.ones(T))
        return scores.logprobs, scores.entropies


class Whole(Part):
    def scores(self) -> tuple[Any, Any]:
        import torch

        logprobs = self.head(self.hidden).log_softmax(-1)
        with torch.no_grad():
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, self.targets[:, None])[:, 0], entropies


def measure(*, repeats: int = 5) -> list[Row]:
    import numpy as np

    sides = {"chunks": Side(Chunks), "whole": Side(Whole)}
    ours, theirs = (side.call("gradient") for side in sides.values())
    gap = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    taken = in_turn(sides, repeats)
    chunks_mb, whole_mb = (side.call("peak") for side in sides.values())
    for side in sides.values():
        side.close()
    slower = median(taken["chunks"]) / median(taken["whole"])
    return [
        Row("3", "loss part: peak above the model", f"{chunks_mb:.0f} MB", f"{whole_mb:.0f} MB",
            round(whole_mb / chunks_mb, 2), f"<= {LIMIT_MB} MB", f"gradient differs by {gap:.1e}"),
        Row("3", "loss part: time", seconds(taken["chunks"]), seconds(taken["whole"]), round(1 / slower, 2),
            f">= {1 / LIMIT_TIME:.2f}"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    print(table(measure(repeats=parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
