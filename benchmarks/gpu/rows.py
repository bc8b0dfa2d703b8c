"""Which rows there are: what each measures, in which Python it runs, how long it takes, and in which order they run."""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One measurement. It runs for each model that PLAN names."""

    kind: str  # table in which it stands
    what: str
    entry: str  # "module:function" below benchmarks.gpu; yields its figures in parts
    least_s: float  # the row is not begun with less time left
    deadline_s: float
    python: str = "art"  # "unsloth", "trl": that Python, where there is one


class Key(NamedTuple):
    """A row for one model. Example: Key("loop-vllm", "0.6b", "bfloat16")."""

    row: str
    shape: str
    dtype: str = "bfloat16"


ROWS = {
    "base": Row("card", "the model on disk", "sampling:base", 15, 420),
    "matmul": Row("card", "a large product", "sampling:matmul", 15, 120),
    "loop-vllm": Row("loop", "art train, vLLM and torch", "loop:vllm", 75, 480),
    "loop-trl": Row("loop", "TRL with vLLM", "loop:trl", 75, 420, python="trl"),
    "loop-trl-64": Row("loop", "TRL with vLLM, micro-batch 64", "loop:trl_large", 75, 420, python="trl"),
    "loop-updates": Row("loop", "art train, two updates a step, rank 64", "loop:updates", 90, 480),
    "loop-24gb": Row("loop", "art train on 23.5 GiB of the card", "loop:limited", 90, 480),
    "loop-embedded": Row("loop", "art train, embedded and torch", "loop:embedded", 60, 480),
    "server-vllm": Row("sampling", "vLLM", "sampling:vllm", 60, 360),
    "sample-embedded": Row("sampling", "embedded", "sampling:embedded", 45, 300),
    "train-torch": Row("training", "torch, FlexAttention", "training:torch_step", 45, 240),
    "train-dense": Row("training", "torch, dense mask", "training:dense_step", 30, 240),
    "train-unsloth": Row("training", "Unsloth", "training:unsloth_step", 45, 300, python="unsloth"),
}

# In the order of their worth, because time may end before the rows do: does the loop run at all, does it with the
# weights of a real model, the other sizes, TRL, then the parts alone.
PLAN = (
    Key("base", "0.6b"),
    Key("loop-vllm", "0.6b"),
    Key("base", "smollm2"),
    Key("loop-vllm", "smollm2"),
    Key("server-vllm", "smollm2"),
    Key("sample-embedded", "smollm2", "float32"),  # its dtype without vLLM, which takes 16 bits only
    Key("base", "1.7b"),
    Key("loop-vllm", "1.7b"),
    Key("base", "4b"),
    Key("loop-vllm", "4b"),
    Key("base", "8b"),
    Key("loop-vllm", "8b"),
    Key("loop-trl", "0.6b"),
    Key("loop-trl", "4b"),
    Key("loop-trl", "8b"),
    Key("loop-trl", "1.7b"),
    Key("server-vllm", "0.6b"),  # with sleep and wake
    Key("loop-updates", "4b"),
    Key("loop-24gb", "4b"),
    Key("train-torch", "0.6b"),
    Key("train-dense", "0.6b"),
    Key("train-unsloth", "0.6b"),
    Key("sample-embedded", "0.6b"),
    Key("loop-embedded", "0.6b"),
    Key("matmul", "0.6b"),
    Key("train-torch", "4b"),
    Key("train-unsloth", "4b"),
    Key("train-torch", "8b"),
    Key("server-vllm", "8b"),
    Key("loop-trl-64", "0.6b"),
)


def plan(*, is_small: bool = False, rows: Sequence[str] = (), shapes: Sequence[str] = ()) -> list[Key]:
    """Returns what to measure, in order: all, or only these rows of these models.

    A model's `base` comes with its rows. In the small mode each row runs once, with a tiny model in place of Qwen3's.
    """
    wanted = [key for key in PLAN if (not rows or key.row in (*rows, "base")) and (not shapes or key.shape in shapes)]
    needed = {key.shape for key in wanted if key.row != "base" or "base" in rows or not rows}
    keys = [key for key in wanted if key.shape in needed]
    if is_small:
        keys = [key if key.shape == "smollm2" else key._replace(shape="small") for key in keys]
    return list(dict.fromkeys(keys))
