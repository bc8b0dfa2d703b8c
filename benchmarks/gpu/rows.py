"""Which rows there are: what each measures, in which Python it runs, and how long it may take."""

from typing import NamedTuple


class Row(NamedTuple):
    """One measurement of one shape."""

    kind: str  # table in which it stands
    what: str
    entry: str  # "module:function" below benchmarks.gpu; yields its figures in parts
    deadline_s: float
    python: str = "art"  # "unsloth": that Python, where there is one
    shapes: tuple[str, ...] = ("0.6b", "4b")


# In the order in which they run: what is missed most where time ends too early comes first.
ROWS = {
    "matmul": Row("card", "a large product", "sampling:matmul", 120, shapes=("0.6b",)),
    "base": Row("card", "the model on disk", "sampling:base", 300),
    "sample-vllm": Row("sampling", "vLLM", "sampling:vllm", 420),
    "sample-embedded": Row("sampling", "embedded", "sampling:embedded", 300),
    "sleep-vllm": Row("server", "vLLM, asleep and awake", "sampling:vllm_sleep", 300),
    "train-torch": Row("training", "torch, FlexAttention", "training:torch_step", 240),
    "train-dense": Row("training", "torch, dense mask", "training:dense_step", 240),
    "train-unsloth": Row("training", "Unsloth", "training:unsloth_step", 300, python="unsloth"),
    "loop-vllm": Row("loop", "art train, vLLM and torch", "loop:vllm", 480),
    "loop-trl": Row("loop", "TRL, micro-batch 16", "loop:trl", 480),
    "loop-trl-64": Row("loop", "TRL, micro-batch 64", "loop:trl_large", 480, shapes=("0.6b",)),
    "loop-embedded": Row("loop", "art train, embedded and torch", "loop:embedded", 480, shapes=("0.6b",)),
}


def keys(shapes: tuple[str, ...]) -> list[tuple[str, str]]:
    """(row, shape) of all that there is to measure: the first shape whole, then the next. "small" has every row."""
    return [(name, shape) for shape in shapes for name, row in ROWS.items() if shape in (*row.shapes, "small")]
