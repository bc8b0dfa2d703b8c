"""RunConfig, the whole configuration. It is frozen, and unknown keys are errors.

Engine, judge, loss, learner and tracker are unions discriminated by `name`, so keys for other variants are errors, too.
All defaults are here and in sections/. docs/config.py generates docs/config.md from RunConfig. A file that implements
one variant imports its section from sections/; other files import from this module.
"""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from art_cli.config.sections.base_config import MAX_COUNT, MAX_NAME, YEAR_S, RunName, Section
from art_cli.config.sections.engine_config import (
    AnthropicEngineConfig,
    AutoEngineConfig,
    EmbeddedEngineConfig,
    EngineConfig,
    EngineSection,
    FeedbackMetricConfig,
    GatewayConfig,
    OpenAIEngineConfig,
    OwnEngineConfig,
    RedactConfig,
    TinkerEngineConfig,
    VllmEngineConfig,
)
from art_cli.config.sections.improve_config import ImproveConfig
from art_cli.config.sections.judge_config import (
    BlendJudgeConfig,
    CascadeJudgeConfig,
    FeedbackJudgeConfig,
    FunctionJudgeConfig,
    JudgeConfig,
    JudgeModelConfig,
    MetricJudgeConfig,
    NamedJudgeConfig,
    NoiseConfig,
    NoJudgeConfig,
    PanelMemberConfig,
    PriceConfig,
    RewardModelJudgeConfig,
    RolloutJudgeConfig,
    RulerJudgeConfig,
    ShadowConfig,
    ShadowName,
    no_litellm,
)
from art_cli.config.sections.loss_config import (
    AlgorithmConfig,
    CispoConfig,
    DapoConfig,
    DistillConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    LossConfig,
    PpoConfig,
    RlooConfig,
    ScaledLossConfig,
    TaughtLossConfig,
    TeacherConfig,
    TruncateConfig,
)
from art_cli.config.sections.model_config import LoraConfig, ModelConfig
from art_cli.config.sections.rollout_config import (
    EnvironmentConfig,
    RolloutConfig,
    ScenariosConfig,
)
from art_cli.config.sections.tracker_config import (
    LangfuseTrackerConfig,
    NoTrackerConfig,
    OtelTrackerConfig,
    OwnTrackerConfig,
    TrackerConfig,
)
from art_cli.config.sections.train_config import (
    BaseLearnerConfig,
    EvalConfig,
    LearnerConfig,
    PromptLearnerConfig,
    SftConfig,
    StopRule,
    TinkerLearnerConfig,
    TorchLearnerConfig,
    TrainConfig,
    UnslothLearnerConfig,
)
from art_cli.config.store_address import Directory, StoreAddress, is_address, problem_of

__all__ = [
    "MAX_COUNT", "MAX_NAME", "YEAR_S", "AlgorithmConfig", "AnthropicEngineConfig", "AutoEngineConfig",
    "BaseLearnerConfig", "BlendJudgeConfig", "CascadeJudgeConfig", "CispoConfig", "DapoConfig", "DistillConfig",
    "DrGrpoConfig", "EmbeddedEngineConfig", "EngineConfig", "EngineSection", "EnvironmentConfig", "EvalConfig",
    "FeedbackJudgeConfig", "FeedbackMetricConfig", "FunctionJudgeConfig", "GatewayConfig", "GrpoConfig", "GspoConfig",
    "ImproveConfig", "JudgeConfig", "JudgeModelConfig", "LangfuseTrackerConfig", "LearnerConfig", "LoraConfig",
    "LossConfig", "MetricJudgeConfig", "ModelConfig", "NamedJudgeConfig", "NoJudgeConfig", "NoTrackerConfig",
    "NoiseConfig", "OpenAIEngineConfig", "OtelTrackerConfig", "OwnEngineConfig", "OwnTrackerConfig",
    "PanelMemberConfig", "PpoConfig", "PriceConfig", "PromptLearnerConfig", "RedactConfig", "RewardModelJudgeConfig",
    "RlooConfig", "RolloutConfig", "RolloutJudgeConfig", "RulerJudgeConfig", "RunConfig", "ScaledLossConfig",
    "ScenariosConfig", "Section", "SftConfig", "ShadowConfig", "StopRule", "TaughtLossConfig", "TeacherConfig",
    "TinkerEngineConfig", "TinkerLearnerConfig", "TorchLearnerConfig", "TrackerConfig", "TrainConfig",
    "TruncateConfig", "UnslothLearnerConfig", "VllmEngineConfig", "no_litellm", "with_base_model",
]  # fmt: skip


class RunConfig(Section):
    name: RunName
    """The run's name; its directory is `runs/<name>`. Default: the file's name, or for config.yaml its directory's."""
    runs: Directory = Path("runs")
    """The directory for runs, relative to the file. An address, such as s3://bucket/prefix, sets `store` instead."""
    store: StoreAddress | None = None
    """The object store that gets a copy of the run: s3://bucket/prefix, gs://... or az://... Another machine can resume
    from it (docs/scale.md)."""
    model: ModelConfig
    """The policy's base model, such as {base: Qwen/Qwen3-0.6B}; with engine openai or anthropic its model."""
    rollout: RolloutConfig
    """The agent and its scenarios, such as {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}."""
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = AutoEngineConfig()
    judge: JudgeConfig = RolloutJudgeConfig()
    """The default is `none` for a loss that uses no rewards (distill with reward_weight 0)."""
    loss: LossConfig = GrpoConfig()
    algorithm: AlgorithmConfig | None = None
    """Your own algorithm, instead of `loss`. null: `loss`."""
    learner: LearnerConfig = TorchLearnerConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig | None = None
    eval: EvalConfig | None = None
    shadow: dict[ShadowName, ShadowConfig] = {}
    """Judges by name whose scores are recorded and never trained on, such as {short: {judge: {entry: "judge.py:short"},
    share: 0.5}} (docs/judges.md)."""
    stop: list[StopRule] = []
    """Rules that pause the run, or warn: [{metric: no_signal_share, above: 0.9, for_steps: 5}, {hours: 2}, {usd: 5}].
    docs/report.md has a rule for each common failure."""
    improve: ImproveConfig | None = None
    """Nightly learning from live traffic, with `art improve`."""
    tracker: TrackerConfig = NoTrackerConfig()
    trackers: list[TrackerConfig] = []
    """More trackers: [wandb, {name: wandb, project: mine}, {entry: "mine.py:MyTracker"}]."""

    @model_validator(mode="before")
    @classmethod
    def _kept_at(cls, data: Any) -> Any:
        """Replaces `runs: s3://bucket/prefix` by `store` and the default directory."""
        runs = data.get("runs") if isinstance(data, dict) and data.get("store") is None else None
        if not isinstance(runs, str) or not is_address(runs) or problem_of(runs):
            return data
        return {key: value for key, value in data.items() if key != "runs"} | {"store": runs}

    @model_validator(mode="before")
    @classmethod
    def _without_rewards(cls, data: Any) -> Any:
        """Sets the judge `none` if the loss uses no rewards and the file names no judge."""
        loss = data.get("loss") if isinstance(data, dict) and "judge" not in data else None
        rollout = data.get("rollout") if loss is not None else None
        sources = rollout.get("sources") if isinstance(rollout, dict) else None
        parts = list(sources.values()) if isinstance(sources, dict) else []
        if parts and all(isinstance(part, dict) and part.get("judge") is not None for part in parts):
            return data
        if isinstance(loss, dict):
            is_silent = loss.get("name") == "distill" and not loss.get("reward_weight")
        else:
            is_silent = isinstance(loss, DistillConfig) and not loss.needs_rewards
        return {**data, "judge": {"name": "none"}} if is_silent else data

    @model_validator(mode="before")
    @classmethod
    def _of_endpoint(cls, data: Any) -> Any:
        """For a prompt search without a `model` section, uses the endpoint's model."""
        if not isinstance(data, dict) or "model" in data:
            return data
        engine, learner = data.get("engine"), data.get("learner")
        is_prompt = isinstance(learner, dict) and learner.get("name") == "prompt"
        name = engine.get("model") if is_prompt and isinstance(engine, dict) else None
        return {**data, "model": {"base": name, "lora": None}} if isinstance(name, str) else data

    @property
    def by_source(self) -> "dict[str, RunConfig]":
        """Configurations by source, each for a run with only this source; {"": self} without sources."""
        return {name: self._of(name, rollout) for name, rollout in self.rollout.by_source.items()}

    def _of(self, name: str, rollout: RolloutConfig) -> "RunConfig":
        if not name:
            return self
        source, changed = self.rollout.sources[name], dict[str, Any](rollout=rollout)
        if source.judge is not None:
            changed["judge"] = source.judge
        if source.eval_scenarios is not None and self.eval is not None:
            changed["eval"] = self.eval.model_copy(update={"scenarios": source.eval_scenarios, "held_out": None})
        return self.model_copy(update=changed)

    def key_in(self, source: str, key: str) -> str:
        """Maps a key in a source's configuration to the key in this configuration."""
        if not source:
            return key
        section, _, rest = key.removeprefix("rollout.").removeprefix("sampling.").partition(".")
        given = self.rollout.sources[source]
        if key == "eval.scenarios" and given.eval_scenarios is not None:
            return f"rollout.sources.{source}.eval_scenarios"
        is_own = key.startswith(("rollout.", "judge")) and getattr(given, section, None) is not None
        return f"rollout.sources.{source}.{'.'.join(filter(None, [section, rest]))}" if is_own else key

    @property
    def learns_by(self) -> LossConfig | AlgorithmConfig:
        """The section that turns scored groups into a gradient: `algorithm` or `loss`."""
        return self.algorithm or self.loss


def with_base_model(config: RunConfig) -> EngineConfig:
    """Returns the engine section; a server's base model defaults to `model.base`."""
    engine = config.engine
    if not isinstance(engine, TinkerEngineConfig) or engine.base_model is not None:
        return engine
    return engine.model_copy(update={"base_model": config.model.base})
