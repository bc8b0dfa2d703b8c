"""The `learner` section: what computes updates of the policy, one class for each learner."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from art_cli.config.sections.base import MAX_PROCESSES, PositiveInt, Section


class BaseLearnerConfig(Section):
    device: str = "auto"
    """The torch device. auto: the GPU if there is one."""
    micro_batch_tokens: PositiveInt | None = None
    """The number of tokens in one forward pass. More takes more memory; the gradient is the same. null: 8192 on a GPU;
    1024 on a CPU, where more runs slower, and more than that where 1024 would cut trees."""
    gradient_checkpointing: bool | PositiveInt = False
    """true: activations are computed again in the backward pass instead of kept, which takes far less memory and a
    third more time. A number: only in forward passes of at least that many tokens. The gradient is the same."""
    offload_optimizer: bool = False
    """true: AdamW's state lives in the CPU's memory and updates are computed there, which saves 8 bytes for each
    trained weight on the GPU. The update is the same."""
    packing: Literal["auto", "tree", "rows"] = "auto"
    """tree: every token that samples share is computed once. rows: one row per sample. auto: tree if that saves some
    hundredths of the tokens, as it nearly always does. The gradient is the same."""
    processes: Annotated[PositiveInt, Field(le=MAX_PROCESSES)] = 1
    """The number of processes that share the packs of an update and divide the model between them (FSDP2), each on a
    GPU of its own, or all on the CPU. The gradient is the same. With more than 1 the engine has its own copy of the
    weights."""


class AutoLearnerConfig(BaseLearnerConfig):
    """Unsloth where there are Unsloth and a GPU, else torch. It has the keys that all learners have."""

    name: Literal["auto"] = "auto"


class TorchLearnerConfig(BaseLearnerConfig):
    """torch and PEFT, on a CPU or one GPU."""

    name: Literal["torch"] = "torch"


class UnslothLearnerConfig(BaseLearnerConfig):
    """The torch learner's step on a policy that Unsloth loads: LoRA adapters on a base in 16 or 4 bits."""

    name: Literal["unsloth"]


class TinkerLearnerConfig(Section):
    """Trains the policy on the server of `engine: tinker`, where its weights are."""

    device: ClassVar[str] = "auto"  # where a policy is loaded all the same, as `art export` does
    processes: ClassVar[int] = 1

    name: Literal["tinker"]


LearnerConfig = Annotated[
    AutoLearnerConfig | TorchLearnerConfig | UnslothLearnerConfig | TinkerLearnerConfig, Field(discriminator="name")
]
