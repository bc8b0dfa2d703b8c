"""LocalTeacher: a teacher's weights in this process, on the learner's device. Nothing is trained or saved."""

import logging
from collections.abc import Sequence
from pathlib import Path

from art_cli.config.schema import ModelConfig
from art_cli.learners.packs.logprob_reader import Reader, divided
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.samples import Floats, Sample
from art_cli.learners.teachers.teacher_server import check_vocabulary
from art_cli.models.adapters import on_base
from art_cli.models.loading import load_weights
from art_cli.models.weights import Weights
from art_cli.runs import run_checkpoints
from art_cli.runtime.errors import LearnerError, UsageError

log = logging.getLogger(__name__)


class LocalTeacher:
    def __init__(self, model: str, policy: Reader, directory: Path) -> None:
        """`model` is a hub id or a path relative to `directory` (base, checkpoint, or run with its best evaluated
        checkpoint).

        Raises UsageError if the model cannot be loaded, or its vocabulary differs from the policy's.
        """
        own = policy.runner.weights
        self.name, self._ranks = f"loss.teacher.model {model!r}", policy.runner.ranks
        weights = load_teacher(model, directory, device=str(own.device), name=self.name)
        check_vocabulary(weights.tokenizer, own.tokenizer, self.name)
        # no backward pass follows, so checkpointing would only cost time
        config = policy.runner.config.model_copy(update={"gradient_checkpointing": False})
        self._reader = Reader(PackRunner(weights, config))

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        most = self._reader.runner.weights.max_length
        for sample in samples:
            if len(sample.token_ids) > most:
                raise LearnerError(
                    f"{self.name}: trajectory {sample.trajectory_id} has {len(sample.token_ids)} tokens, and the "
                    f"teacher's context holds {most}"
                )
        return divided(samples, self._ranks, self._reader.logprobs)


def load_teacher(model: str, directory: Path, *, device: str, name: str) -> Weights:
    """Returns `model`'s weights; errors use `name` for it. Raises UsageError if they cannot be loaded."""
    found = run_checkpoints.find(directory / model)
    if found is None:
        if model.startswith((".", "/", "~")):
            raise UsageError(f"{name}: no such directory")
        return load_weights(ModelConfig(base=model, lora=None), model, device=device, named=name)
    log.info("%s: %s: %s", name, found.path, found.why)
    trained = run_checkpoints.run_config(found.run).get("model", {})
    base = run_checkpoints.base_of(found) if found.is_adapter else str(found.path.resolve())
    template = found.path / run_checkpoints.TEMPLATE_FILE
    config = ModelConfig.model_validate(
        {
            "base": base,
            "lora": None,
            "dtype": (found.manifest.dtype if found.manifest is not None else "") or "auto",
            "max_length": trained.get("max_length"),
            "quantize": trained.get("quantize"),
            "chat_template": template if template.is_file() else None,
        }
    )
    weights = load_weights(config, base, device=device, named=name)
    return on_base(weights, found.path) if found.is_adapter else weights
