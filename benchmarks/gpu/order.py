"""Order: what a row's process is told. Plain data without a dependency, because a row may run in another Python."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class NotHere(Exception):
    """This machine lacks what the row needs. The message names it in one line, with what to do."""


@dataclass(frozen=True)
class Order:
    """One row. Example: Order("sample-vllm", "0.6b", "bfloat16", work="runs/bench-gpu", vllm="/opt/vllm/bin/python")"""

    row: str
    shape: str
    dtype: str
    work: str  # directory for models and runs
    vllm: str | None = None  # Python that has vLLM; None: there is none

    @property
    def is_small(self) -> bool:
        return self.shape == "small"

    @property
    def directory(self) -> Path:
        return Path(self.work).absolute()

    def vllm_python(self) -> Path:
        if self.vllm is None:
            raise NotHere("no Python with vLLM: pip install vllm, or name one in ART_VLLM_PYTHON")
        return Path(self.vllm)

    def text(self) -> str:
        return json.dumps(asdict(self))
