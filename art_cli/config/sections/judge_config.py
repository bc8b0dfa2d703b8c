"""The `judge` section, with one class per judge, and `shadow`, whose scores are recorded and never trained on."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from art_cli.config.sections.base_config import (
    Count,
    Device,
    Float,
    Int,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    UnitInterval,
)

FlipRate = Annotated[Float, Field(ge=0, lt=1)]
# The default judge. OpenAI names it as the successor of o3, with a price within 25 % of o3's. Its agreement with people
# was not measured; `art judge --gold` measures it on your attempts.
DEFAULT_JUDGE = "openai/gpt-6.1-sol"
RULE = "builtin:rule"  # follows rules in the rubric, without a model
# Names in `judge.params` that litellm uses itself instead of sending them.
LITELLM_PARAMS = frozenset(
    {
        *("api_key", "api_base", "api_version", "base_url", "organization", "headers", "extra_headers", "extra_body"),
        *("drop_params", "additional_drop_params", "allowed_openai_params", "fallbacks", "mock_response"),
    }
)


class NoiseConfig(Section):
    """The judge's known errors: either its flip rates, for verdicts of 0 and 1, or (`noise: votes`) the spread of its
    votes on each attempt."""

    false_positive: FlipRate | None = None
    """The share of wrong attempts with a 1. `art judge --report --gold` measures it."""
    false_negative: FlipRate | None = None
    """The share of right attempts with a 0."""
    min_reliability: UnitInterval = 0.0
    """Groups at or below this reliability are skipped, and count as groups without signal. Reliability is the true
    share of the reward differences. 0 skips groups with differences that vote noise explains."""

    @property
    def is_from_votes(self) -> bool:
        return self.false_positive is None

    @model_validator(mode="after")
    def _pair_of_rates(self) -> Self:
        if (self.false_positive is None) != (self.false_negative is None):
            raise ValueError("set both 'false_positive' and 'false_negative', or neither")
        if (self.false_positive or 0.0) + (self.false_negative or 0.0) >= 1:
            raise ValueError("false_positive + false_negative must be below 1: otherwise the judge only guesses")
        return self


def _noise_from_votes(section: Any) -> Any:
    return {} if section == "votes" else section


class ScoringJudgeConfig(Section):
    noise: Annotated[NoiseConfig | None, BeforeValidator(_noise_from_votes)] = None
    """The judge's known errors, which correct advantages: {false_positive: 0.1, false_negative: 0.2}, or votes. null:
    no correction."""


class RolloutJudgeConfig(ScoringJudgeConfig):
    """The reward that the rollout returned."""

    name: Literal["rollout"] = "rollout"


class MetricJudgeConfig(ScoringJudgeConfig):
    """A metric that the rollout reports."""

    name: Literal["metric"]
    metric: str
    """The metric's name in the rollout's Outcome, such as `win`."""


class NoJudgeConfig(Section):
    """No judge, for losses without rewards. A rollout's reward is its returned reward, or 0."""

    name: Literal["none"]


class FunctionJudgeConfig(ScoringJudgeConfig):
    """Your own judge: a class, or a function `judge(group: list[Trajectory])` that returns a list of rewards or a dict
    from id to reward. `judge: {entry: ...}` means this judge."""

    name: Literal["function"]
    entry: str
    """The function as "file.py:function", or a class "file.py:Class", a subclass of art_cli.Judge (docs/judges.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments for the class."""
    timeout_s: Seconds = 600.0
    """The time limit for a group."""


class PriceConfig(Section):
    """US dollars per million tokens, for a model that the packaged price table does not know."""

    input: NonNegative
    """Dollars per million prompt tokens."""
    output: NonNegative
    """Dollars per million completion tokens."""


DEFAULT_PRICE = PriceConfig(input=2, output=10)


class JudgeModelConfig(Section):
    """A judging model and its connection."""

    model: str = DEFAULT_JUDGE
    """The model by litellm's name (PROVIDER/MODEL), or with `base_url` by the server's. Providers except OpenAI need
    litellm: pip install 'art-cli[litellm]'. builtin:rule follows rules in `rubric` without a model."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint: http://127.0.0.1:8000/v1. null: `model`'s provider (for OpenAI the address in
    OPENAI_BASE_URL, if set)."""
    api_key_env: str | None = None
    """The variable with the key, in the environment or .env. null: the provider's usual variable; OPENAI_API_KEY for a
    `base_url`."""
    params: dict[str, JsonValue] = {}
    """More parameters for each call: {temperature: 0}, {reasoning_effort: low}."""
    response_format: Literal["auto", "json_schema", "text"] = "auto"
    """The requested answer format. auto: a JSON schema if the model supports it, else text."""
    price: PriceConfig | None = None
    """The model's price. null: litellm's table, or unknown without litellm."""

    @model_validator(mode="after")
    def _rule_is_asked_here(self) -> Self:
        if self.model.startswith("builtin:") and self.model != RULE and self.base_url is None:
            raise ValueError(f"the only built-in judge model is {RULE}")
        unused = [name for name in ("base_url", "api_key_env", "params", "price") if getattr(self, name)]
        if self.model == RULE and unused:
            raise ValueError(f"{RULE} runs in this process and calls no server: remove {', '.join(unused)}")
        return self

    @property
    def is_rule(self) -> bool:
        """True if the judge follows the rubric's rules without a model."""
        return self.model == RULE

    @property
    def needs_litellm(self) -> bool:
        """True for models behind litellm. OpenAI's models and models at a `base_url` are called directly."""
        if self.base_url is not None or self.is_rule:
            return False
        is_plain = self.model.startswith("openai/") and not self.model.startswith("openai/responses/")
        return not is_plain or any(name in LITELLM_PARAMS for name in self.params)


def no_litellm(member: JudgeModelConfig) -> str:
    cure = "pip install 'art-cli[litellm]', or name an OpenAI-compatible endpoint in base_url"
    return f"{member.model} is asked through litellm, which is not installed: {cure}"


class PanelMemberConfig(JudgeModelConfig):
    weight: PositiveFloat = 1.0
    """The weight of its score in the panel's mean."""


class RulerJudgeConfig(JudgeModelConfig, ScoringJudgeConfig):
    """RULER: a language model sees all attempts in a group and scores each in [0, 1] against the others."""

    name: Literal["ruler"]
    panel: list[PanelMemberConfig] = []
    """Several models instead of `model`, with the same keys and a `weight`. The score is the weighted mean."""
    rubric: Path | None = None
    """A text file with the criteria. null: the packaged rubric."""
    instructions: Path | None = None
    """A text file with the whole system prompt; the rubric replaces `{rubric}`. null: the packaged prompt."""
    votes: PositiveInt = 1
    """Calls per model, whose scores are averaged. Every call has a different order of attempts and different ids."""
    seed: Seed = 0
    """The seed for orders and ids."""
    max_group: Annotated[Int, Field(ge=4, le=64)] = 16
    """The limit on attempts in a call. A larger group is judged in overlapping parts, which put the scores on one
    scale."""
    max_tokens_per_attempt: Annotated[Int, Field(ge=100)] = 10_000
    """The limit on an attempt's tokens, at 4 bytes each. Longer attempts are cut: first tool outputs in the middle,
    then other long texts."""
    attempts: PositiveInt = 3
    """The tries for a usable vote. In each, the model once gets its unusable answer back with the error."""
    retries: Count = 6
    """Retries after rate limits, server errors, lost connections and timeouts."""
    timeout_s: Seconds = 300.0
    """The time limit for a call."""
    concurrency: PositiveInt = 32
    """The calls in parallel."""
    budget_usd: PositiveFloat | None = None
    """Limit in dollars. Judging stops before exceeding it, with all verdicts saved. null: no limit."""
    budget_tokens: PositiveInt | None = None
    """The limit on prompt and completion tokens together. null: no limit."""
    cache: Path | Literal["user"] | None = "user"
    """The SQLite file for cached verdicts. user: art/verdicts.sqlite in the user's cache directory. null: no cache."""

    @model_validator(mode="after")
    def _model_or_panel(self) -> Self:
        fields = JudgeModelConfig.model_fields
        single = [name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if self.panel and single:
            raise ValueError(f"with a panel, each member has its own: remove {', '.join(single)}")
        return self


class RewardModelJudgeConfig(ScoringJudgeConfig):
    """A local sequence-classification model: the score is a logit, or its probability, for the whole conversation."""

    name: Literal["reward_model"]
    model: str
    """A hub id or directory for `AutoModelForSequenceClassification`."""
    label: Count = 0
    """The index of the model's output that becomes the score."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Maps the logit to the score. none: the logit itself, also outside [0, 1]. sigmoid: of a judge that `art reward`
    trained on values from 0 to 1, the expected value, on its teacher's scale."""
    batch_size: PositiveInt = 8
    """The conversations per forward pass."""
    max_length: PositiveInt | None = None
    """Limit on tokens. Longer conversations are cut at the start. null: the model's context length."""
    device: Device = "auto"
    """The torch device. auto: a GPU if available, else the CPU."""


def _own_judge(section: Any) -> Any:
    """Adds the name `function` to a section with only an `entry`. A text is a judge's name."""
    if isinstance(section, str):
        return {"name": section}
    is_own = isinstance(section, dict) and "entry" in section and "name" not in section
    return {"name": "function", **section} if is_own else section


_OneJudgeConfig = (
    RolloutJudgeConfig | MetricJudgeConfig | FunctionJudgeConfig | RulerJudgeConfig | RewardModelJudgeConfig
)
NamedJudgeConfig = Annotated[_OneJudgeConfig, Field(discriminator="name"), BeforeValidator(_own_judge)]


class BlendJudgeConfig(ScoringJudgeConfig):
    """The weighted mean of several judges' rewards."""

    name: Literal["blend"]
    blend: dict[str, PositiveFloat]
    """Each judge's weight: {ruler: 0.7, rollout: 0.3}. A name is in `judges`, or a judge with defaults."""
    judges: dict[str, NamedJudgeConfig] = {}
    """Judges in `blend` with other settings: {strict: {name: ruler, rubric: strict.txt}}."""

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        if not self.blend:
            raise ValueError("'blend' needs at least one judge")
        if inner := [name for name, judge in self.judges.items() if judge.noise is not None]:
            raise ValueError(f"'noise' is for the blended reward: set it next to 'blend', not in {', '.join(inner)}")
        if unknown := sorted(set(self.blend) - set(self.judges) - {"rollout", "ruler"}):
            raise ValueError(f"define {', '.join(unknown)} under 'judges'; only 'rollout' and 'ruler' have defaults")
        if unused := sorted(set(self.judges) - set(self.blend)):
            raise ValueError(f"{', '.join(unused)} under 'judges' has no weight in 'blend'")
        return self


class CascadeJudgeConfig(ScoringJudgeConfig):
    """A cheap judge scores every group; an expensive judge replaces its scores where it is unsure, and by lot."""

    name: Literal["cascade"]
    first: NamedJudgeConfig
    """The cheap judge, like a `judge` section: {name: reward_model, model: DIR}."""
    then: NamedJudgeConfig
    """The expensive judge: {name: ruler}."""
    unsure: UnitInterval = 0.2
    """The largest share of groups that `then` scores because `first` orders their attempts least surely."""
    audit: UnitInterval = 0.05
    """The share of groups that `then` scores by lot, by a hash of the group's id. They measure the agreement."""

    @property
    def has_values(self) -> bool:
        """Returns whether the cheap judge's scores are expected values of the expensive judge's reward, in [0, 1]."""
        return isinstance(self.first, RewardModelJudgeConfig) and self.first.activation == "sigmoid"

    @model_validator(mode="after")
    def _no_noise(self) -> Self:
        if self.first.noise is not None or self.then.noise is not None or self.noise is not None:
            raise ValueError("'noise' is for one judge's rewards, and the groups of a cascade come from two")
        return self


class FeedbackJudgeConfig(ScoringJudgeConfig):
    """A metric that clients gave the conversation (docs/gateway.md). True is 1, False is 0; metrics to minimize are
    negated. A metric of replies gives its mean."""

    name: Literal["feedback"]
    metric: str
    """The metric's name in `gateway.feedback`, such as `thumbs`."""
    file: Path | None = None
    """The gateway's feedback.jsonl. null: the file in the directory of `art judge`'s trajectories."""
    otherwise: NamedJudgeConfig | None = None
    """The judge of attempts without this feedback, such as ruler. null: their group stays unscored."""


_Judges = _OneJudgeConfig | BlendJudgeConfig | CascadeJudgeConfig | FeedbackJudgeConfig
JudgeConfig = Annotated[_Judges | NoJudgeConfig, Field(discriminator="name")]
ScoringJudge = Annotated[_Judges, Field(discriminator="name"), BeforeValidator(_own_judge)]


ShadowName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=40)]


class ShadowConfig(Section):
    """One shadow judge."""

    judge: NamedJudgeConfig
    """The judge, like a `judge` section: {entry: "judge.py:short"}, {name: ruler, rubric: strict.txt}, {name: rollout}
    for the returned reward, or {name: metric, metric: win}."""
    share: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """The share of groups that it scores, by a hash of the group's id."""
    timeout_s: Seconds = 60.0
    """A group's longest wait for it in seconds. After three failures or timeouts in a row it rests until the next
    start."""
