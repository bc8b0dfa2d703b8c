"""The `learner` section: the trainer of the policy, one class for each learner."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from art_cli.config.sections.base_config import MAX_PROCESSES, Device, PositiveInt, Seconds, Section, WeightsAt

MAX_NODES = 256


class BaseLearnerConfig(Section):
    imports_first: ClassVar[bool] = False  # True: it patches torch and transformers when it is imported
    device: Device = "auto"
    """The torch device. auto: the GPU if there is one."""
    micro_batch_tokens: PositiveInt | None = None
    """The number of tokens in one forward pass. More tokens take more memory; the gradient is the same. null: 8192 on a
    GPU, and 1024 on a CPU, where more is slower (but as many as a tree needs)."""
    gradient_checkpointing: bool | PositiveInt = False
    """true: activations are recomputed in the backward pass, which takes far less memory and a third more time. A
    number: only in forward passes of at least that many tokens. The gradient is the same."""
    offload_optimizer: bool = False
    """true: AdamW's state is in the host's memory, and updates are computed on the CPU. This saves 8 bytes of GPU
    memory per trained weight. The update is the same."""
    packing: Literal["auto", "tree", "rows"] = "auto"
    """tree: tokens that samples share are computed once. rows: one row per sample. auto: tree if it saves some
    percent of the tokens, which is nearly always the case. The gradient is the same."""
    processes: Annotated[PositiveInt, Field(le=MAX_PROCESSES)] = 1
    """The number of processes that share the packs of an update and shard the model (FSDP2), each on another GPU, or
    all on the CPU. The gradient is the same. With more than one, the engine has a separate copy of the weights."""
    nodes: Annotated[PositiveInt, Field(le=MAX_NODES)] = 1
    """The number of machines that share the packs of an update, each with `processes` processes. This machine is the
    first; each other one runs `art join CONFIG`. The gradient is the same."""
    rendezvous: str | None = None
    """HOST:PORT at which the nodes meet: an address of the machine that runs `art train`, and a free port there.
    Used with `nodes` above 1."""
    shard: Literal["node", "all"] = "node"
    """The processes over which the model is sharded. node: each node holds the whole model, and only gradients go
    between nodes. all: one copy over all processes of all nodes, for a model that one node cannot hold; every
    layer's weights then go over the network in each pass."""
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
    """Unsloth if Unsloth and a GPU are there, else torch. It has the keys that all learners share."""

    name: Literal["auto"] = "auto"


class TorchLearnerConfig(BaseLearnerConfig):
    """torch and PEFT, on a CPU or one GPU."""

    name: Literal["torch"] = "torch"


class UnslothLearnerConfig(BaseLearnerConfig):
    """The torch learner with a policy that Unsloth loads: LoRA adapters on a base in 16 or 4 bits."""

    imports_first = True

    name: Literal["unsloth"]


class TinkerLearnerConfig(Section):
    """The server of `engine: tinker`, which holds the weights and trains them."""

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
