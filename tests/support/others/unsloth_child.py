"""Run by a Python that has Unsloth: loads a tiny base through it, trains a step, says as JSON how it compares.

The other side is the same policy, its adapter's numbers copied, loaded by transformers and peft.

    python tests/support/others/unsloth_child.py BASE DTYPE [4bit]
"""

import contextlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def main(base: str, dtype: str, quantize: str | None) -> dict[str, Any]:
    from art_cli.config.schema import GrpoConfig, ModelConfig, TrainConfig, UnslothLearnerConfig
    from art_cli.learners import LearnerSetup, unsloth
    from art_cli.models.loading import load_weights
    from art_cli.models.weights import token_logprobs

    settings = {"base": base, "dtype": dtype, "quantize": quantize, "lora": {"rank": 4, "alpha": 8}}
    config = ModelConfig.model_validate(settings)
    weights = load_weights(config, base, seed=3, load=unsloth.load_model)

    import torch  # after Unsloth

    from art_cli.learners.torch_learner import TorchLearner
    from tests.support.records.trees import sampled, scored, turn

    plain = load_weights(config, base, device=weights.device.type, seed=3)
    _copy_adapter(weights.model, plain.model)
    groups = [
        [
            scored(sampled(plain, [turn([1, 2, 3], answer)]), reward, index=index, group="g")
            for index, (answer, reward) in enumerate([([20, 21, 22], 1.0), ([20, 31, 32], 0.0), ([40], 0.3)])
        ]
    ]
    learners = [
        TorchLearner(
            w,
            LearnerSetup(
                train=TrainConfig(learning_rate=1e-5, epochs_per_step=1),
                loss=GrpoConfig(),
                learner=UnslothLearnerConfig(name="unsloth"),
            ),
        )
        for w in (weights, plain)
    ]
    ids = list(range(2, 60))
    before = [token_logprobs(w, ids) for w in (weights, plain)]
    metrics = [learner.step(groups) for learner in learners]
    with TemporaryDirectory() as directory:
        learners[0].save(Path(directory))
        files = sorted(path.name for path in Path(directory).iterdir())
        learners[1].load(Path(directory))
    after = [learner.score(ids) for learner in learners]
    trained = [p for p in weights.model.parameters() if p.requires_grad]
    return {
        "version": unsloth.version("unsloth"),
        "torch": torch.__version__,
        "device": weights.device.type,
        "quantized": bool(getattr(weights.model.get_base_model(), "is_quantized", False)),
        "adapter_dtypes": sorted({str(p.dtype) for p in trained}),
        "num_trained": len(trained),
        "can_pack": learners[0].runner.can_pack,
        "gap_before": max(abs(a - b) for a, b in zip(*before, strict=True)),
        "gap_after_loading_its_checkpoint": max(abs(a - b) for a, b in zip(*after, strict=True)),
        "moved": max(abs(a - b) for a, b in zip(after[0], before[0], strict=True)),
        "grad_norms": [m.grad_norm for m in metrics],
        "logprob_gap": metrics[0].logprob_gap,
        "files": files,
    }


def _copy_adapter(source: Any, target: Any) -> None:
    """Also makes it show: B is random, not zero."""
    import torch

    torch.manual_seed(0)
    ours = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            if "lora_" in name:
                ours[name].copy_(parameter)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    print(json.dumps(result))
