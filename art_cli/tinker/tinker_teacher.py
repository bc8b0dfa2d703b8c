"""TinkerTeacher: a teacher on a Tinker server, queried through the official SDK.

The server returns a prompt's logprobs under softmax(logits), so tokens sampled at temperatures other than 1 cannot be
taught. The protocol offers no tokenization, so the vocabularies cannot be compared. A warning says so.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from art_cli.config.sections.loss_config import TeacherConfig
from art_cli.learners.packs.logprob_reader import divided
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.samples import Floats, Sample
from art_cli.learners.teachers.teacher_server import check_temperatures
from art_cli.runtime.errors import LearnerError, RemoteError
from art_cli.runtime.secrets import load_environment
from art_cli.tinker.client.remote_server import RemoteSession, server_at

log = logging.getLogger(__name__)

KEY_NAME = "TINKER_API_KEY"  # the SDK's default variable
PATH = "tinker://"  # prefix of saved weights; other model names are base models


class TinkerTeacher:
    def __init__(self, config: TeacherConfig, directory: Path, *, ranks: Ranks) -> None:
        """Reads a .env file in `directory`. Raises LearnerError if the server has no such model or does not answer."""
        assert config.base_url is not None, "without a base_url the teacher is in this process"
        load_environment(directory)
        self._config, self._ranks = config, ranks
        self.name = f"loss.teacher {config.model!r} at {config.base_url}"
        model = config.model
        try:
            server = server_at(config.base_url, config.api_key_env or KEY_NAME)
            if not model.startswith(PATH):
                server.find_model(model)
            self._session = RemoteSession(server, timeout_s=config.timeout_s)
            named = {"path": model} if model.startswith(PATH) else {"base": model}
            self._sampler: Any = self._session.sampler(**named)
        except RemoteError as error:
            raise LearnerError(f"{self.name}: {error}") from error
        log.warning("%s: its vocabulary cannot be compared with the policy's, and must be the same", self.name)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        check_temperatures(samples, self.name)
        return divided(samples, self._ranks, self._read)

    def _read(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] logprobs for each sample. A sequence shared by several samples is requested once."""
        sequences = list({sample.token_ids.tobytes(): sample.token_ids.tolist() for sample in samples}.items())
        found: dict[bytes, Floats] = {}
        at_once, prompt = self._config.concurrency, self._session.types.ModelInput.from_ints
        try:
            for begin in range(0, len(sequences), at_once):
                some = sequences[begin : begin + at_once]
                asked = [(key, ids, self._sampler.compute_logprobs(prompt(ids))) for key, ids in some]
                for key, ids, future in asked:
                    found[key] = self._checked(self._session.wait(future, "the teacher's logprobs"), len(ids))
        except RemoteError as error:
            raise LearnerError(f"{self.name}: {error}") from error
        return [found[sample.token_ids.tobytes()][sample.targets] for sample in samples]

    def _checked(self, given: Any, num_tokens: int) -> Floats:
        """Returns [L] each token's logprob given the preceding tokens; NaN for the initial token."""
        values = list(given or ())[1 - num_tokens :]  # the initial token has no logprob; some servers omit it
        if len(values) != num_tokens - 1 or not all(isinstance(each, float) and each <= 0 for each in values):
            raise LearnerError(f"{self.name}: its answer has no logprob for some of {num_tokens} tokens")
        return np.array([np.nan, *values])
