"""The `learner` section: what computes updates of the policy, one class for each learner."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from art_cli.config.sections.base_config import MAX_PROCESSES, Device, PositiveInt, Seconds, Section, WeightsAt

MAX_NODES = 256


class BaseLearnerConfig(Section):
    imports_first: ClassVar[bool] = False  # True: it patches torch and transformers when it is imported
    device: Device = "auto"
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
    nodes: Annotated[PositiveInt, Field(le=MAX_NODES)] = 1
    """The number of machines that share the packs of an update, each with `processes` processes. This one is the first;
    each other one runs `art join CONFIG`. The gradient is the same."""
    rendezvous: str | None = None
    """HOST:PORT where the nodes meet: an address of the machine that runs `art train`, which listens there, and a free
    port. Used with `nodes` above 1."""
    shard: Literal["node", "all"] = "node"
    """What the model is divided over. node: each node holds the whole model, divided over its own processes, and only
    gradients go between nodes. all: one copy over all processes of all nodes, for a model that one node cannot hold;
    every layer's weights then go over the network in each pass."""
    join_timeout_s: Seconds = 600.0
    """The longest wait for the other nodes."""

    @property
    def num_ranks(self) -> int:
        """The number of processes on all machines together."""
        return self.nodes * self.processes

    @property
    def weights(self) -> WeightsAt:
        """The place of the weights that it trains."""
        return "here" if self.num_ranks == 1 else "process"

    @field_validator("rendezvous")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                raise ValueError("HOST:PORT, such as 10.0.0.4:29500")
        return address


class AutoLearnerConfig(BaseLearnerConfig):
    """Unsloth where there are Unsloth and a GPU, else torch. It has the keys that all learners have."""

    name: Literal["auto"] = "auto"


class TorchLearnerConfig(BaseLearnerConfig):
    """torch and PEFT, on a CPU or one GPU."""

    name: Literal["torch"] = "torch"


class UnslothLearnerConfig(BaseLearnerConfig):
    """The torch learner's step on a policy that Unsloth loads: LoRA adapters on a base in 16 or 4 bits."""

    imports_first = True

    name: Literal["unsloth"]


class TinkerLearnerConfig(Section):
    """Trains the policy on the server of `engine: tinker`, where its weights are."""

    device: ClassVar[str] = "auto"  # where a policy is loaded all the same, as `art export` does
    processes: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    num_ranks: ClassVar[int] = 1
    weights: ClassVar[WeightsAt] = "server"
    imports_first: ClassVar[bool] = False

    name: Literal["tinker"]

    @model_validator(mode="before")
    @classmethod
    def _has_no_processes(cls, given: Any) -> Any:
        if isinstance(given, dict) and (named := [key for key in ("nodes", "processes", "rendezvous") if key in given]):
            keys = " and ".join(f"learner.{key}" for key in named)
            raise ValueError(
                f"'tinker' trains on a server, where {keys} has no effect; leave it out, or train with learner=torch"
            )
        return given


LearnerConfig = Annotated[
    AutoLearnerConfig | TorchLearnerConfig | UnslothLearnerConfig | TinkerLearnerConfig, Field(discriminator="name")
]
