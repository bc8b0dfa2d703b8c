"""RunConfig and its sections: every knob, its default and what it means. Frozen; unknown keys are errors.

A section that can be one of several (engine, judge, loss, learner, tracker) is a union that `name` discriminates. A key
that the chosen variant does not have is therefore an error and never a silent no-op. Defaults stand here and nowhere
else. docs/config.md is made from this file by docs/config.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticCustomError

from art_cli.builtin_models import BUILTIN_MODELS


def _not_true_or_false(value: Any) -> Any:
    """The value; a bool is refused, which pydantic would take for 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "true and false are no numbers")
    return value


MAX_COUNT = 2**31 - 1
YEAR_S = 31_536_000.0  # longest timeout; event loops refuse timers of 1e308 s
MAX_PROCESSES = 1024
MAX_NAME = 200  # characters of a run's name; a file name has 255, and files beside a run add to it

Int = Annotated[int, BeforeValidator(_not_true_or_false)]
Float = Annotated[float, BeforeValidator(_not_true_or_false)]
Seed = Annotated[Int, Field(ge=-(2**63), lt=2**63)]
PositiveInt = Annotated[Int, Field(gt=0, le=MAX_COUNT)]
Count = Annotated[Int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[Float, Field(gt=0, le=YEAR_S)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `name=7` on a command line is a name
    )


# --- model ------------------------------------------------------------------------------------------------------------


class LoraConfig(Section):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A."""

    rank: PositiveInt = 16
    """The rank of B and A."""
    alpha: PositiveInt = 32
    """The adapter's scale, in multiples of 1 / rank."""
    targets: str | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """The names of the modules that get an adapter, or "all-linear": every linear layer but the head."""


class ModelConfig(Section):
    """The base model, and what of it is trained."""

    base: str
    """A hub id, a directory, or "file.py:function", which writes a model and its tokenizer into a directory.

    "builtin:tiny" is a model of a million random parameters that needs no hub.
    """
    lora: LoraConfig | None = LoraConfig()
    """The adapter that is trained. null: all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the base weights. auto: bfloat16 on a GPU that has it, and on a CPU with AMX for models of 8 million
    parameters and more; else float32. A run keeps the dtype it began with. Adapters are always float32."""
    quantize: Literal["4bit"] | None = None
    """4bit: the frozen base is kept in 4 bits (NF4, by bitsandbytes) and computed in `dtype`; needs `lora`. null: the
    base is not quantized."""
    max_length: PositiveInt | None = None
    """The largest number of tokens of prompt and reply together. null: the model's own context length."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""

    @field_validator("base")
    @classmethod
    def _find_builtin(cls, base: str) -> str:
        """The base; for "builtin:tiny" the entry of the function that builds it."""
        family, _, name = base.partition(":")
        if family != "builtin":
            return base
        if name not in BUILTIN_MODELS:
            raise ValueError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN_MODELS)}")
        return f"art_cli.builtin_models:{name}"


# --- rollout ----------------------------------------------------------------------------------------------------------


class SamplingConfig(Section):
    """Defaults for model calls that do not set these themselves; with `force`, the values for all calls."""

    temperature: NonNegative = 1.0
    """What the logits are divided by. 0: the likeliest token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """The probability of the smallest set of likeliest tokens to sample from. 1: all."""
    top_k: Count = 0
    """The number of likeliest tokens to sample from. 0: all."""
    max_tokens: PositiveInt = 1024
    """The largest number of tokens of one reply."""
    force: bool = False
    """true: these temperature, top_p and top_k, and art's own seeds, replace what a call sets. The turn records what
    the call asked for."""


class RolloutConfig(Section):
    """The user's agent, the scenarios, and how many attempts are made at once and in each step."""

    entry: str | None = None
    """The rollout as "file.py:function": `async def rollout(policy, scenario)`, or a plain `def`."""
    python: Path | None = None
    """The Python that runs the function, 3.11 or newer, or the directory of its environment (.venv). It needs none of
    art's packages. null: the Python that art runs in."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """An external program instead of `entry`. It reads the scenario from standard input and writes one JSON line.
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are set in its environment."""
    scenarios: str
    """A JSON-lines file, or "file.py:function" that returns an iterable of objects with an `id`."""
    group_size: PositiveInt = 8
    """G, the number of attempts per scenario and step."""
    groups_per_step: PositiveInt = 16
    """The number of scenarios per step."""
    concurrency: PositiveInt = 64
    """The number of rollouts that are played at once."""
    processes: Annotated[Count, Field(le=MAX_PROCESSES)] = 1
    """The number of child processes that run the function; more help a function that computes much. 0: it runs in
    art's own process, for a debugger."""
    timeout_s: Seconds = 600.0
    """The longest time for one rollout, its retries included."""
    max_turns: PositiveInt = 50
    """The largest number of model calls in one rollout."""
    limit_reward: Float = 0.0
    """The reward of a rollout that `max_turns` or the context length ends before it returned one."""
    retries: Count = 2
    """How often a rollout whose transport failed is played again. One whose own code raised is never played again."""
    shuffle: bool = True
    """true: each epoch has a seeded order of its own. false: the file's order, again and again."""
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _one_of_entry_and_command(self) -> Self:
        if (self.entry is None) == (self.command is None):
            raise ValueError("set exactly one of 'entry' (a Python function) and 'command' (an external program)")
        return self


class GatewayConfig(Section):
    """Where the capturing proxy listens for the rollouts' model calls."""

    host: str = "127.0.0.1"
    """The address of this machine to listen on."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """0: any free port."""


# --- engine -----------------------------------------------------------------------------------------------------------


class EngineSection(Section):
    """The section of one engine. It says what the engine can do (engines.EngineTraits explains each)."""

    can_train: ClassVar[bool] = True
    swaps_adapters: ClassVar[bool] = False
    enforces_formats: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = False


class AutoEngineConfig(EngineSection):
    """vLLM where there is a vLLM, a GPU and a model that it can serve; else embedded. A run that sets an engine's keys
    names that engine."""

    name: Literal["auto"] = "auto"


class EmbeddedEngineConfig(EngineSection):
    """Samples in this process with torch: CPU or GPU, one copy of the weights with the learner.

    Only float32 weights below 512 MiB are copied on a CPU, where a copy with the adapter merged is a fifth faster.
    """

    needs_weights = True

    name: Literal["embedded"] = "embedded"
    max_batch: PositiveInt = 128
    """The number of sequences that are decoded together; further ones wait."""
    prefill_tokens: PositiveInt = 8192
    """The number of prompt tokens in one forward pass."""


class OpenAIEngineConfig(EngineSection):
    """Any OpenAI-compatible endpoint, for `art generate` and `art eval`. Its model cannot be trained."""

    can_train = False

    name: Literal["openai"]
    url: str
    """The endpoint's base URL: https://host/v1."""
    model: str
    """The model, as the endpoint names it."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key. The key itself never stands in a file."""
    timeout_s: Seconds = 300.0
    """The longest time for one request."""


# The arguments and variables of vLLM that art sets itself -> the configuration key to use instead, if there is one.
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
VLLM_OWN_ENV = ("VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE")


class VllmEngineConfig(EngineSection):
    """vLLM, which art starts as a process, or which runs already at `url`. It swaps LoRA adapters: `model.lora` is
    set."""

    swaps_adapters = True

    name: Literal["vllm"]
    python: Path | None = None
    """The Python of the environment that has vLLM. null: the Python that art runs in."""
    args: dict[str, JsonValue] = {}
    """vLLM's arguments, by its own names: {tensor-parallel-size: 2, enforce-eager: true}. null removes an argument that
    art sets by default."""
    env: dict[str, str] = {}
    """Environment variables of the server. They stand in the run's config.json, so put no secrets here."""
    sleep: Literal["auto", 0, 1, 2] = "auto"
    """What happens to the weights while the learner works. 1: they move to the host's memory. 2: they are dropped.
    0: they stay on the GPU. auto: 1 where engine and learner share a GPU, else 0."""
    start_timeout_s: Seconds = 600.0
    """The longest time from the start of the process to its first answer."""
    url: str | None = None
    """A vLLM server that runs already and sees the run's files: http://127.0.0.1:8000. null: art starts one."""
    api_key_env: str = "VLLM_API_KEY"
    """The environment variable that holds the key of the server at `url`."""
    timeout_s: Seconds = 600.0
    """The longest time for one request."""

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

    @model_validator(mode="after")
    def _own_or_running(self) -> Self:
        of_own = {"python", "args", "env", "sleep", "start_timeout_s"} & self.model_fields_set
        if self.url is not None and of_own:
            raise ValueError(f"with 'url' the server is somebody else's: remove {', '.join(sorted(of_own))}")
        if self.url is None and "api_key_env" in self.model_fields_set:
            raise ValueError("'api_key_env' is the key of a server at 'url'; a server of our own gets a random one")
        return self


class OwnEngineConfig(EngineSection):
    """A user's own engine: a class in a file beside the configuration."""

    name: Literal["entry"]
    entry: str
    """ "file.py:Class", made as art_cli.engines says: Class(setup)."""
    options: dict[str, JsonValue] = {}
    """What the class gets as `setup.options`; no secrets: they stand in config.json."""


EngineConfig = Annotated[
    AutoEngineConfig | EmbeddedEngineConfig | OpenAIEngineConfig | VllmEngineConfig | OwnEngineConfig,
    Field(discriminator="name"),
]


# --- judge ------------------------------------------------------------------------------------------------------------


class RolloutJudgeConfig(Section):
    """The reward that the rollout itself returned."""

    name: Literal["rollout"] = "rollout"


class FunctionJudgeConfig(Section):
    """A user's own judge: a class, or a function `judge(group: list[Trajectory])`, which returns a list of rewards or a
    dict from id to reward. `judge: {entry: ...}` means this one."""

    name: Literal["function"]
    entry: str
    """The function as "file.py:function".

    Or a class as "file.py:Class", a subclass of art_cli.Judge (docs/judges.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""
    timeout_s: Seconds = 600.0
    """The longest time for one group."""


class PriceConfig(Section):
    """US dollars per million tokens, for a model that the packaged price table does not know."""

    input: NonNegative
    """The price of a million prompt tokens."""
    output: NonNegative
    """The price of a million completion tokens."""


# The names in `judge.params` that litellm uses itself, and does not send as fields of the request.
LITELLM_PARAMS = frozenset(
    {
        *("api_key", "api_base", "api_version", "base_url", "organization", "headers", "extra_headers", "extra_body"),
        *("drop_params", "additional_drop_params", "allowed_openai_params", "fallbacks", "mock_response"),
    }
)


class JudgeModelConfig(Section):
    """A model that judges, and how it is reached."""

    model: str = "openai/o3"
    """The model, as litellm names it (openai/o3, anthropic/claude-sonnet-4-5), or with `api_base` as that server names
    it. Other providers than OpenAI need litellm: pip install 'art-cli[litellm]'."""
    api_base: str | None = None
    """Any OpenAI-compatible endpoint: http://127.0.0.1:8000/v1. null: the provider that `model` names (OpenAI is asked
    at OPENAI_BASE_URL, if that is set)."""
    api_key_env: str | None = None
    """The variable, in the environment or in .env, that holds the key. null: the provider's usual one; OPENAI_API_KEY
    for an `api_base`."""
    params: dict[str, JsonValue] = {}
    """Parameters that each call passes on: {temperature: 0}, {reasoning_effort: low}."""
    response_format: Literal["auto", "json_schema", "text"] = "auto"
    """How the answer is asked for. auto: by a JSON schema if the model takes one, else as text."""
    price: PriceConfig | None = None
    """What the model costs. null: litellm's packaged table; unknown where litellm is not installed."""

    @property
    def needs_litellm(self) -> bool:
        """Whether the model is asked through litellm. OpenAI's own models and those at an `api_base` are not."""
        if self.api_base is not None:
            return False
        is_plain = self.model.startswith("openai/") and not self.model.startswith("openai/responses/")
        return not is_plain or any(name in LITELLM_PARAMS for name in self.params)


def no_litellm(member: JudgeModelConfig) -> str:
    """What to tell a user whose judge needs litellm, which is not installed."""
    cure = "pip install 'art-cli[litellm]', or name an OpenAI-compatible endpoint in api_base"
    return f"{member.model} is asked through litellm, which is not installed: {cure}"


class PanelMemberConfig(JudgeModelConfig):
    weight: PositiveFloat = 1.0
    """The weight of its score in the panel's mean."""


class RulerJudgeConfig(JudgeModelConfig):
    """RULER: a language model sees all attempts of a group at once and scores each in [0, 1] against the others."""

    name: Literal["ruler"]
    panel: list[PanelMemberConfig] = []
    """Several models instead of `model`, each with the keys of a judge's model and a `weight`. The score is their
    weighted mean."""
    rubric: Path | None = None
    """A text file with what the judge looks for. null: the packaged rubric."""
    instructions: Path | None = None
    """A text file with the whole system prompt, in which the rubric replaces `{rubric}`. null: the packaged prompt."""
    votes: PositiveInt = 1
    """How often each model is asked, each time with the attempts in another order and under other ids."""
    aggregate: Literal["mean", "median"] = "mean"
    """How the votes become one score."""
    seed: Seed = 0
    """The seed of the orders and ids."""
    max_group: Annotated[Int, Field(ge=4, le=64)] = 16
    """The largest number of attempts in one call. A larger group is judged in parts that share anchors, and put on one
    scale."""
    max_tokens_per_attempt: Annotated[Int, Field(ge=100)] = 10_000
    """The largest number of tokens of an attempt, estimated at 4 bytes a token. In a longer one tool outputs are cut in
    the middle first, then the other long texts."""
    attempts: PositiveInt = 3
    """How often a vote is asked for again when its answer cannot be used. Each time the model is once sent its answer
    with what is wrong in it."""
    retries: Count = 6
    """How often a call is made again after a rate limit, a server error, a lost connection or its deadline."""
    timeout_s: Seconds = 300.0
    """The longest time for one call."""
    concurrency: PositiveInt = 32
    """The number of calls at once."""
    budget_usd: PositiveFloat | None = None
    """The most that may be spent. Judging stops before a call would exceed it, and everything so far is saved. null: no
    limit."""
    budget_tokens: PositiveInt | None = None
    """The largest number of prompt and completion tokens together. null: no limit."""
    cache: Path | Literal["user"] | None = "user"
    """The SQLite file of verdicts already paid for. user: art/verdicts.sqlite in the user's cache directory. null:
    none."""

    @model_validator(mode="after")
    def _model_or_panel(self) -> Self:
        fields = JudgeModelConfig.model_fields
        single = [name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if self.panel and single:
            raise ValueError(f"with a panel, each member has its own: remove {', '.join(single)}")
        return self


class RewardModelJudgeConfig(Section):
    """A local sequence-classification model: the score is one logit (or its probability) of the whole conversation."""

    name: Literal["reward_model"]
    model: str
    """A hub id or a directory with a model that `AutoModelForSequenceClassification` loads."""
    label: Count = 0
    """The index of the model's output that is the score."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """How the logit becomes the score. none: it is the score, and may lie outside [0, 1]."""
    batch_size: PositiveInt = 8
    """The number of conversations in one forward pass."""
    max_length: PositiveInt | None = None
    """The largest number of tokens of a conversation; only the end of a longer one counts. null: the model's own
    context length."""
    device: str = "auto"
    """The torch device. auto: the GPU if there is one."""


def _own_judge(section: Any) -> Any:
    """A judge without a name but with an `entry` is a user's own."""
    is_own = isinstance(section, dict) and "entry" in section and "name" not in section
    return {"name": "function", **section} if is_own else section


_OneJudgeConfig = RolloutJudgeConfig | FunctionJudgeConfig | RulerJudgeConfig | RewardModelJudgeConfig
NamedJudgeConfig = Annotated[_OneJudgeConfig, Field(discriminator="name"), BeforeValidator(_own_judge)]


class BlendJudgeConfig(Section):
    """The weighted mean of several judges' rewards."""

    name: Literal["blend"]
    blend: dict[str, PositiveFloat]
    """The weight of each judge: {ruler: 0.7, rollout: 0.3}. A name is one of `judges`, or a judge with its defaults."""
    judges: dict[str, NamedJudgeConfig] = {}
    """The judges in `blend` that need keys of their own: {strict: {name: ruler, rubric: strict.txt}}."""

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        if not self.blend:
            raise ValueError("'blend' needs at least one judge")
        if unknown := sorted(set(self.blend) - set(self.judges) - {"rollout", "ruler"}):
            raise ValueError(f"define {', '.join(unknown)} under 'judges'; only 'rollout' and 'ruler' have defaults")
        if unused := sorted(set(self.judges) - set(self.blend)):
            raise ValueError(f"{', '.join(unused)} under 'judges' has no weight in 'blend'")
        return self


JudgeConfig = Annotated[_OneJudgeConfig | BlendJudgeConfig, Field(discriminator="name")]


# --- loss -------------------------------------------------------------------------------------------------------------


class BaseLossConfig(Section):
    kl: NonNegative = 0.0
    """Weight of KL(policy || reference), k3 estimate; the reference is the model, adapter off. 0: not computed."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: each token's weight is min(learner / engine, cap). null: off."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(knob, message) for each knob that is set and has no effect."""
        yield from ()


class ScaledLossConfig(BaseLossConfig):
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation."""


class GrpoConfig(ScaledLossConfig):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): PPO clip, mean over all trained tokens of the step."""

    name: Literal["grpo"] = "grpo"
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts from 1 - clip to 1 + clip."""


class DrGrpoConfig(BaseLossConfig):
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no division by length or standard deviation."""

    name: Literal["dr_grpo"]
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts from 1 - clip to 1 + clip."""
    max_tokens: PositiveInt | None = None
    """The constant each trajectory's sum is divided by. null: rollout.sampling.max_tokens."""


class DapoConfig(ScaledLossConfig):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, token-level mean, soft punishment of overlong replies."""

    name: Literal["dapo"]
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 0.28
    """The ratio of new to old probability counts up to 1 + clip_high."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Trajectories cut off by a length limit: train as they are, leave out, or lower the reward near the limit."""
    overlong_buffer: PositiveInt = 256
    """Tokens before the limit in which the penalty grows from 0 to 1 (equation 13)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "overlong_buffer" in self.model_fields_set and self.overlong != "penalty":
            yield "overlong_buffer", f"used with loss.overlong 'penalty' only, which is {self.overlong!r}"


class GspoConfig(ScaledLossConfig):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio of a whole sequence, its geometric mean over tokens."""

    name: Literal["gspo"]
    clip: PositiveFloat = 3e-4
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of new to old probability counts up to 1 + clip_high."""


class CispoConfig(ScaledLossConfig):
    """CISPO (MiniMax-M1 2025, arXiv:2506.13585): the clipped, detached ratio as a weight on the log-likelihood."""

    name: Literal["cispo"]
    clip: PositiveFloat = 1.0
    """Lower bound 1 - clip; at 1 there is none."""
    clip_high: PositiveFloat = 4.0
    """The ratio of new to old probability counts up to 1 + clip_high."""


LossConfig = Annotated[GrpoConfig | DrGrpoConfig | DapoConfig | GspoConfig | CispoConfig, Field(discriminator="name")]


class AlgorithmConfig(BaseLossConfig):
    """A user's own algorithm, instead of a named loss."""

    entry: str
    """ "file.py:Class", a subclass of art_cli.learners.algorithms.Algorithm (docs/algorithms.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""


# --- learner ----------------------------------------------------------------------------------------------------------


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


LearnerConfig = Annotated[AutoLearnerConfig | TorchLearnerConfig | UnslothLearnerConfig, Field(discriminator="name")]


# --- train, sft, eval, tracker ----------------------------------------------------------------------------------------


class TrainConfig(Section):
    """How the policy is updated, and what is kept."""

    steps: PositiveInt = 50
    """The number of steps of the whole run."""
    learning_rate: PositiveFloat = 1e-5
    """AdamW's learning rate, constant after the warm-up."""
    warmup_steps: Count = 0
    """The number of steps over which the learning rate grows from 0."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    updates_per_step: PositiveInt = 1
    """The number of optimizer steps on each batch of groups, which are divided between them."""
    max_staleness: Count = 0
    """By how many steps the policy that samples a token may be older than the policy that is trained on it. 0:
    on-policy, engine and learner take turns. 1 or more: later batches are sampled while the learner works; needs
    `loss.importance_cap`."""
    max_logprob_gap: PositiveFloat = 0.1
    """The mean difference in nats between the engine's and the learner's logprobs at which an on-policy run stops,
    because they no longer hold the same weights."""
    keep_checkpoints: PositiveInt = 3
    """The number of newest checkpoints that are kept. The best evaluated one and step 0 are kept besides."""
    seed: Seed = 0
    """The seed of the adapter, the order of scenarios and the sampling."""


class SftConfig(Section):
    """A warm-up on chat transcripts before the first step; only the assistant's tokens are trained on."""

    demos: str
    """A JSON-lines file of {"messages": [...], "tools": [...]}, or "file.py:function" that returns such objects."""
    epochs: PositiveInt = 1
    """How often each transcript is trained on."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's learning rate, constant after the warm-up steps."""
    batch_size: PositiveInt = 16
    """The number of transcripts per optimizer step."""
    warmup_steps: Count = 0
    """The number of optimizer steps over which the learning rate grows from 0."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""


class EvalConfig(Section):
    """How the policy is evaluated while it is trained, and by `art eval`."""

    scenarios: str
    """The scenarios to evaluate on, written as `rollout.scenarios` is."""
    every: PositiveInt = 10
    """The number of steps between evaluations. The first and the last policy are always evaluated."""
    attempts: PositiveInt = 1
    """The number of attempts per scenario."""
    temperature: NonNegative | None = None
    """The sampling temperature. null: that of `rollout.sampling`."""
    judge: bool = True
    """Whether a judge gives the reward where rollouts return none. It compares each policy's attempts with those of the
    first policy that was evaluated, and `reward` is the share that it prefers. false: such evaluations have no
    reward."""


class NoTrackerConfig(Section):
    """metrics.jsonl only."""

    name: Literal["none"] = "none"


class WandbTrackerConfig(Section):
    """Weights & Biases besides metrics.jsonl: every metric, and a table of samples for each step."""

    name: Literal["wandb"]
    project: str = "art"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team. null: the default one of the key."""
    mode: Literal["online", "offline"] = "online"
    """offline: nothing is sent, and neither a key nor a network is needed."""


class OwnTrackerConfig(Section):
    """A user's own tracker: a class with the methods log, log_trajectories and close (art_cli.trackers.Tracker)."""

    name: Literal["entry"]
    """May be left out beside `entry`."""
    entry: str
    """ "file.py:Class", made as Class(run, **options) (docs/trackers.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""


TrackerConfig = Annotated[NoTrackerConfig | WandbTrackerConfig | OwnTrackerConfig, Field(discriminator="name")]


class RunConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)
    """The run's name; its directory is `runs/<name>`. If not given: the file's name, or its directory's
    for config.yaml."""
    runs: Path = Path("runs")
    """The directory of the run directories, relative to the config file."""
    model: ModelConfig
    rollout: RolloutConfig
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = AutoEngineConfig()
    judge: JudgeConfig = RolloutJudgeConfig()
    loss: LossConfig = GrpoConfig()
    algorithm: AlgorithmConfig | None = None
    """null: the one that `loss` names."""
    learner: LearnerConfig = AutoLearnerConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig | None = None
    eval: EvalConfig | None = None
    tracker: TrackerConfig = NoTrackerConfig()
    trackers: list[TrackerConfig] = []
    """A list of trackers, besides `tracker`: [wandb, {name: wandb, project: mine}, {entry: "mine.py:MyTracker"}]."""

    @property
    def learns_by(self) -> LossConfig | AlgorithmConfig:
        """The section that says how scored groups become a gradient."""
        return self.algorithm or self.loss
