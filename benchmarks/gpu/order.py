"""Order: what the process of one row is started with. No dependency, because a row may run in another Python."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class NotHere(Exception):
    """This machine lacks what the row needs. The message names it in one line, with what to do."""


@dataclass(frozen=True)
class Order:
    """One row. Example: Order("loop-vllm", "0.6b", "bfloat16", work="runs/bench-gpu", vllm="/opt/vllm/bin/python")"""

    row: str
    shape: str
    dtype: str
    work: str  # directory for models and runs
    card: str = "CPU"  # name of the GPU, or "CPU"
    vllm: str | None = None  # Python that has vLLM, or None if there is none
    trl: str | None = None  # Python that has TRL, or None if there is none
    is_small: bool = False  # True: little work, for a CPU

    @property
    def name(self) -> str:
        """Example: "loop-vllm-0.6b"; of a float32 row "sample-embedded-smollm2-float32"."""
        return f"{self.row}-{self.shape}" + ("" if self.dtype == "bfloat16" else f"-{self.dtype}")

    @property
    def directory(self) -> Path:
        return Path(self.work).absolute()

    @property
    def has_gpu(self) -> bool:
        return self.card != "CPU"

    def vllm_python(self) -> Path:
        if self.vllm is None:
            raise NotHere("no Python with vLLM: pip install vllm, or name one in ART_VLLM_PYTHON")
        return Path(self.vllm)

    def trl_python(self) -> Path:
        if self.trl is None:
            raise NotHere("no Python with TRL: make setup-trl, or name one in ART_TRL_PYTHON")
        return Path(self.trl)

    def text(self) -> str:
        return json.dumps(asdict(self))
