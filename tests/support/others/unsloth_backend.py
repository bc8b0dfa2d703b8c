"""Two clients' adapters on a base that Unsloth loaded, and on one that transformers loaded: how far apart they end.

python tests/support/others/unsloth_backend.py BASE      in a Python that has Unsloth; prints the distances as JSON
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def compare(path: str) -> dict[str, Any]:
    """Each client takes two updates, in turn with the other; the learning rates differ."""
    from art_cli.config.schema import ModelConfig, UnslothLearnerConfig
    from art_cli.learners import unsloth
    from art_cli.models.loading import load_weights

    config = ModelConfig(base=path, lora=None, dtype="float32")
    loaded = load_weights(config, path, load=unsloth.load_bare)
    unsloth.check_adapters(loaded)

    from art_cli.tinker.server.base_model import Base, Parts  # after Unsloth

    plain = load_weights(config, path, device=loaded.device.type)
    learner = UnslothLearnerConfig(name="unsloth")
    clients = [
        [Base(weights, name="tiny", lora=None, learner=learner).new_learner(4, seed, Parts()) for seed in (0, 1)]
        for weights in (loaded, plain)
    ]
    logprobs, moved = 0.0, 0.0
    for update in range(2):
        for number in range(2):
            passed = [_pass(side[number], seed=2 * update + number, rate=(1e-3, 1e-2)[number]) for side in clients]
            logprobs = max(logprobs, max(abs(a - b).max() for a, b in zip(*passed, strict=True)))
    weights = 0.0
    for ours, theirs in zip(*clients, strict=True):
        for name, parameter in _tensors(ours).items():
            weights = max(weights, float((parameter - _tensors(theirs)[name]).abs().max()))
            moved = max(moved, float(parameter.abs().max()) if "lora_B" in name else 0.0)
    return {"device": loaded.device.type, "logprobs": float(logprobs), "weights": weights, "moved": moved}


def _tensors(learner: Any) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in learner.parameters.items()}


def _pass(learner: Any, *, seed: int, rate: float) -> list[Any]:
    """The logprobs before the update."""
    import numpy as np

    from art_cli.learners.optimizer import Adam
    from art_cli.tinker.server.datums import Datum

    draw = np.random.default_rng(seed)
    data = []
    for length in (9, 14):
        ids = draw.integers(0, 250, length)
        numbers = {"weights": draw.normal(size=(length - 1, 1))}
        data.append(Datum(inputs=ids[:-1], targets=ids[1:, None], numbers=numbers))
    passed = learner.run(data, "cross_entropy", {}, backward=True)
    learner.update(Adam(learning_rate=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), max_norm=0.0)
    return list(passed.logprobs)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = compare(sys.argv[1])
    print(json.dumps(result))
