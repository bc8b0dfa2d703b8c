"""The `engine` section, with one class per engine, and the `gateway` section for the capturing proxy."""

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from art_cli.config.sections.base_config import Int, PositiveFloat, PositiveInt, Seconds, Section, WeightsAt

# vLLM arguments that art sets -> configuration key to use instead.
VLLM_OWN_ARGS = {
    "model": "model.base",
    "dtype": "model.dtype",
    "max-model-len": "model.max_length",
    "chat-template": "model.chat_template",
    "max-lora-rank": "model.lora.rank",
    "enable-sleep-mode": "engine.sleep",
    "hf-token": "the environment variable HF_TOKEN",
    **dict.fromkeys(("host", "port", "uds", "root-path", "ssl-keyfile", "ssl-certfile", "api-key", "config")),
    **dict.fromkeys(("enable-lora", "served-model-name", "logprobs-mode", "generation-config", "headless")),
}
# asserted by vllm-bnb-plugin 0.0.3 (quantization/params.py)
ONLY_BFLOAT16 = "in 4 bits vLLM computes in bfloat16 only"
VLLM_OWN_ENV = ("VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE")


class RedactConfig(Section):
    """Texts that `art gateway` replaces by "[redacted]" before it writes. API keys and passwords in URLs are always
    replaced. A redacted call loses its token ids, which would reveal the text."""

    patterns: list[str] = []
    """Python regular expressions; matches are replaced."""
    keys: list[str] = []
    """JSON key names, in any case, whose values are replaced: in tool call arguments, and in messages with JSON."""

    @field_validator("patterns")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                compiled = re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
            if compiled.search("") is not None:
                raise ValueError(f"{pattern!r} matches an empty text, and so everything")
        return patterns


MetricName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]


class FeedbackMetricConfig(Section):
    """A metric that clients of `art gateway` may send to /v1/feedback (docs/gateway.md)."""

    type: Literal["boolean", "float"]
    """boolean: true or false. float: a finite number."""
    level: Literal["reply", "conversation"] = "reply"
    """The rated thing. A conversation is named by its own id or name, or by the id of one of its replies."""
    optimize: Literal["max", "min"] = "max"
    """Whether more is better. With min, `judge: {name: feedback}` negates the value."""


class GatewayConfig(Section):
    """The address where the capturing proxy listens. The other keys are for `art gateway` only (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """This machine's address to listen on."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """The port. 0: any free port, or 8000 in `art gateway`."""
    directory: Path | None = None
    """The directory for trajectories. null: `gateway` in the run's directory."""
    idle_s: Seconds = 1800.0
    """Seconds without a call that end a conversation. A later call starts a new conversation."""
    max_open: PositiveInt = 1000
    """The limit on conversations in memory. Above it, the longest idle conversation ends."""
    max_open_mb: PositiveFloat = 256.0
    """The limit in MB on conversations in memory. Above it, the longest idle conversation ends."""
    rotate_mb: PositiveFloat = 64.0
    """A file of trajectories is written when recorded calls have this size in MB."""
    rotate_s: Seconds = 86400.0
    """A file of trajectories is written when the oldest recorded call has this age in seconds."""
    group_size: PositiveInt = 8
    """The limit on attempts in a group. More attempts at the scenario form another group."""
    redact: RedactConfig = RedactConfig()
    feedback: dict[MetricName, FeedbackMetricConfig] = {}
    """Metrics of feedback by name: {thumbs: {type: boolean}, minutes: {type: float, level: conversation, optimize:
    min}}. `comment` and `demonstration` need no declaration."""

    @field_validator("feedback")
    @classmethod
    def _unreserved(cls, feedback: dict[str, FeedbackMetricConfig]) -> dict[str, FeedbackMetricConfig]:
        if reserved := {"comment", "demonstration"} & feedback.keys():
            raise ValueError(f"{', '.join(sorted(reserved))}: reserved, and needs no declaration")
        return feedback


class EngineSection(Section):
    """An engine's section and traits (see engines.EngineTraits)."""

    can_train: ClassVar[bool] = True
    swaps_adapters: ClassVar[bool] = False
    enforces_formats: ClassVar[bool] = True
    weights: ClassVar[WeightsAt] = "process"

    @property
    def title(self) -> str:
        """Name for log lines."""
        return str(getattr(self, "name"))  # noqa: B009

    @property
    def server(self) -> tuple[str, str | None] | None:
        """The server with the weights, as (URL, base model). None if this machine has the weights."""
        return None

    @property
    def paid_model(self) -> str | None:
        """Name of the paid model in price tables. None if sampling is free."""
        return None


class AutoEngineConfig(EngineSection):
    """vLLM if it is installed, a GPU is present and it supports the model; else the embedded engine. To set keys, name
    the engine."""

    name: Literal["auto"] = "auto"


class EmbeddedEngineConfig(EngineSection):
    """Samples in this process with torch on CPU or GPU, and shares the learner's weights. On a CPU, float32 weights up
    to an eighth of the memory are copied and merged, which can be a third faster."""

    weights = "here"

    name: Literal["embedded"] = "embedded"
    max_batch: PositiveInt = 128
    """The sequences decoded in parallel. Others wait."""
    prefill_tokens: PositiveInt = 8192
    """The prompt tokens per forward pass."""


class OpenAIEngineConfig(EngineSection):
    """Any OpenAI-compatible endpoint, for `art gateway`, `art generate` and `art eval`. Its model cannot be trained,
    but `learner: prompt` finds a better prompt."""

    can_train = False

    name: Literal["openai"]
    base_url: str
    """The endpoint's base URL: https://host/v1."""
    model: str
    """The endpoint's name for the model."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable with the key. No file holds the key itself."""
    timeout_s: Seconds = 300.0
    """The time limit for a reply, or between pieces of a streamed reply."""

    @property
    def paid_model(self) -> str:
        return self.model


class AnthropicEngineConfig(EngineSection):
    """Any endpoint with Anthropic's Messages, for `art gateway`, `art generate` and `art eval`. Its model cannot be
    trained, but `learner: prompt` finds a better prompt. Replies have no token ids."""

    can_train = False

    name: Literal["anthropic"]
    base_url: str = "https://api.anthropic.com"
    """The endpoint's base URL, without /v1/messages."""
    model: str
    """The endpoint's name for the model."""
    api_key_env: str = "ANTHROPIC_API_KEY"
    """The environment variable with the key. No file holds the key itself."""
    max_tokens: PositiveInt = 8192
    """The limit on a reply's tokens if a call sets none, because the protocol requires a number."""
    timeout_s: Seconds = 300.0
    """The time limit for a reply, or between pieces of a streamed reply."""


HostedEngineConfig = OpenAIEngineConfig | AnthropicEngineConfig


class VllmEngineConfig(EngineSection):
    """vLLM, started by art or running at `base_url`. It swaps LoRA adapters, so `model.lora` must be set."""

    swaps_adapters = True

    name: Literal["vllm"]
    python: Path | None = None
    """The Python with vLLM. null: art's Python."""
    args: dict[str, JsonValue] = {}
    """vLLM's arguments by its own names: {tensor-parallel-size: 2, enforce-eager: true}. null removes a default of
    art."""
    env: dict[str, str] = {}
    """The server's environment variables. They are written to config.json, so put no secrets here."""
    sleep: Literal["auto", 0, 1, 2] = "auto"
    """vLLM's sleep level while the learner works. 1 moves weights to host memory, 2 drops them, 0 keeps them on the
    GPU. auto: 1 if engine and learner share a GPU, else 0."""
    start_timeout_s: Seconds = 600.0
    """Time limit for starting."""
    replicas: PositiveInt = 1
    """Number of model copies (vLLM's data parallel size), on separate GPUs. A request goes to the least busy copy."""
    base_url: str | None = None
    """A running vLLM server that can read the run's files: http://127.0.0.1:8000. null: art starts a server."""
    api_key_env: str = "VLLM_API_KEY"
    """The environment variable with the key for `base_url`."""
    timeout_s: Seconds = 600.0
    """The time limit for a reply, or between pieces of a streamed reply."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_server(cls, url: object) -> object:
        """Accepts a list with one URL, as in older configurations."""
        if not isinstance(url, list):
            return url
        if len(url) != 1:
            raise ValueError("'base_url' is one server, which may have several replicas (vllm --data-parallel-size)")
        return url[0]

    @field_validator("args")
    @classmethod
    def _not_our_args(cls, args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in args:
            plain = name.lstrip("-").replace("_", "-")
            if plain in VLLM_OWN_ARGS:
                where = VLLM_OWN_ARGS[plain]
                raise ValueError(f"{name!r} is set by art itself" + (f"; use {where}" if where else "; remove it"))
            if name.startswith("-"):
                raise ValueError(f"{name!r}: write it without dashes in front: {plain!r}")
        return args

    @field_validator("env")
    @classmethod
    def _not_our_env(cls, env: dict[str, str]) -> dict[str, str]:
        if ours := [name for name in VLLM_OWN_ENV if name in env]:
            raise ValueError(f"{', '.join(ours)} is set by art itself; remove it")
        return env

    @property
    def title(self) -> str:
        """Example: "vllm (2 replicas)"."""
        return self.name if self.replicas == 1 else f"{self.name} ({self.replicas} replicas)"

    @model_validator(mode="after")
    def _own_or_running(self) -> Self:
        of_started = {"python", "args", "env", "sleep", "start_timeout_s", "replicas"} & self.model_fields_set
        if "@" in (self.base_url or ""):
            raise ValueError("'base_url' has a password: give the server's key in 'api_key_env'")
        if self.base_url is not None and of_started:
            raise ValueError(f"with 'base_url' the server runs already: remove {', '.join(sorted(of_started))}")
        if self.base_url is None and "api_key_env" in self.model_fields_set:
            raise ValueError("'api_key_env' is for a server at 'base_url'; a server that art starts gets a random key")
        return self


class TinkerEngineConfig(EngineSection):
    """A Tinker server on another machine, such as `art backend`. `learner: tinker` trains on it."""

    enforces_formats = False
    weights = "server"

    name: Literal["tinker"]
    base_url: str = Field(pattern=r"^https?://[^\s/@]+(/[^\s@]*)?$", max_length=2000)
    """The server's root: http://gpu:8100."""
    api_key_env: str = "TINKER_API_KEY"
    """The environment variable with the key. No file holds the key itself."""
    base_model: str | None = None
    """The server's name for the base model. null: `model.base`."""
    timeout_s: Seconds = 3600.0
    """The time limit in seconds for a request, with its wait for a free slot."""

    @property
    def server(self) -> tuple[str, str | None]:
        return self.base_url, self.base_model


class OwnEngineConfig(EngineSection):
    """Your own engine: a Python class."""

    name: Literal["entry"]
    entry: str
    """The class "file.py:Class", called as Class(setup) (art_cli/engines)."""
    options: dict[str, JsonValue] = {}
    """The class's `setup.options`. They are written to config.json, so put no secrets here."""

    @property
    def title(self) -> str:
        return self.entry


# Engines for foreign endpoints. Their models cannot be trained, but a prompt can be searched for.
HOSTED: dict[str, type[EngineSection]] = {"openai": OpenAIEngineConfig, "anthropic": AnthropicEngineConfig}

EngineConfig = Annotated[
    AutoEngineConfig
    | EmbeddedEngineConfig
    | OpenAIEngineConfig
    | AnthropicEngineConfig
    | VllmEngineConfig
    | TinkerEngineConfig
    | OwnEngineConfig,
    Field(discriminator="name"),
]
