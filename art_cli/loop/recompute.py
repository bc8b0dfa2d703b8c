"""What a step computed of one trajectory, computed again from the run's files and compared with the record.

    trajectories.jsonl, scored.jsonl  ->  reward   from the rollout, the function, or the recorded votes
    + learned.jsonl                   ->  advantage, from the rewards of the whole step
    + checkpoint of the step          ->  the learner's logprobs, and the trajectory's share of the loss
    + checkpoint of the next step     ->  the logprobs after the step

Nothing is written, and no weight of the run is touched. A run may be a stranger's: code that its configuration names (a
judge's function, an algorithm, a builder of a base model) runs only if the caller names the directory that it lies in.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from pydantic import ValidationError

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import BlendJudgeConfig, FunctionJudgeConfig, RolloutJudgeConfig, RulerJudgeConfig, RunConfig
from art_cli.judges import make_judge
from art_cli.loop.comparison import (
    EXACT,
    ROUNDING,
    Compared,
    compare_learned,
    compare_numbers,
    first_difference,
    mean_change,
    mean_gap,
)
from art_cli.loop.stage_policy import PolicySource, open_learner
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import LearnedTrajectory, PerToken, ScoredTrajectory, Trajectory
from art_cli.runtime import threads
from art_cli.runtime.errors import CheckpointError, DataError, JudgeError, RunError, UsageError

log = logging.getLogger(__name__)

ID = re.compile(r"s(\d+)-g\d+-a\d+")


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What `art replay --json` prints. Lists of numbers have an entry per turn, as in learned.jsonl."""

    schema_version: int = 1
    run: str
    step: int
    id: str
    sample: int  # place in the step's learned.jsonl
    rows: list[Compared]
    engine_logprobs: list[list[float]]  # the engine reported them when it sampled
    old_logprobs: list[PerToken] | None  # the learner's at the step's checkpoint; None: not computed
    new_logprobs: list[PerToken] | None  # the learner's at the next step's checkpoint; None: not computed
    engine_gap: float | None  # mean |engine - learner| in nats; None: not computed
    change: float | None  # mean new - old in nats; None: not computed

    @property
    def differs(self) -> bool:
        return any(row.verdict == "differs" for row in self.rows)


def replay(
    run: RunDir, *, step: int | None, sample: int | None = None, id: str | None = None, directory: Path | None = None
) -> Replayed:
    """Computes one trajectory of a step again. `sample` is its place in learned.jsonl; None: the first one trained on.

    `step` may be left out where `id` says it. `directory` is that of the configuration file. Raises RunError: no run
    there; UsageError: no such step or trajectory; DataError: a file is damaged.
    """
    if step is None:
        step = _step_of(id)
    lines = run.learned(step)
    if not lines:
        raise UsageError(
            f"{run.learned_path(step)}: not there, or empty: the step has no record (train.record_learned)"
        )
    place = _find(lines, sample, id, run.learned_path(step))
    return _Replayer(run, step, lines, directory).replay(place)


def _step_of(id: str | None) -> int:
    if id is None:
        raise UsageError("--step N: which step? It is the number of its directory, step_NNNN")
    match = ID.fullmatch(id)
    if match is None:
        raise UsageError(f"--id {id}: its step is not in its name; add --step N")
    return int(match[1])


def _find(lines: Sequence[LearnedTrajectory], sample: int | None, id: str | None, path: Path) -> int:
    """The place of the line that is meant."""
    if id is not None:
        places = [place for place, line in enumerate(lines) if line.id == id]
        if not places:
            raise UsageError(f"--id {id}: {path} has no such trajectory; the first is {lines[0].id}")
        return places[0]
    if sample is not None:
        if not 0 <= sample < len(lines):
            raise UsageError(f"--sample {sample}: {path} has trajectories 0 to {len(lines) - 1}")
        return sample
    return next((place for place, line in enumerate(lines) if line.left_out is None), 0)


class _Replayer:
    """Replays trajectories of one step."""

    def __init__(self, run: RunDir, step: int, lines: Sequence[LearnedTrajectory], directory: Path | None) -> None:
        self.run, self.step, self.lines, self.directory = run, step, lines, directory
        self.loaded = _loaded(run, directory)
        self.config = self.loaded.config
        self.groups = _groups(run, step, lines)

    def replay(self, place: int) -> Replayed:
        line = self.lines[place]
        group = next(group for group in self.groups if any(each.id == line.id for each in group))
        scored = next(each for each in group if each.id == line.id)
        rows = [*self._played(scored), *self._reward(scored, group)]
        old = new = None
        why = self._why_no_learner(self.step)
        if not why:
            with self._learner(self.step) as learner:
                old = learner.compute_again(self.groups, line.id)
                if not (missing := self._why_no_learner(self.step + 1)):
                    learner.load(self.run.checkpoint_path(self.step + 1))
                    new = learner.compute_again(self.groups, line.id)
        else:
            missing = why
        computed = old if old is not None else self._advantages_again(line.id)
        rows += compare_learned(
            line, computed, scored, rounding=ROUNDING.get(self.config.model.dtype, max(ROUNDING.values())), why=why
        )
        if new is None:
            rows.append(Compared("logprobs after the step", "not computed", why=missing))
        known_old = old.logprobs if old is not None and old.left_out is None else None
        known_new = new.logprobs if new is not None and new.left_out is None else None
        return Replayed(
            run=str(self.run.root),
            step=self.step,
            id=line.id,
            sample=place,
            rows=rows,
            engine_logprobs=[turn.logprobs for turn in scored.turns],
            old_logprobs=known_old,
            new_logprobs=known_new,
            engine_gap=mean_gap(scored, known_old),
            change=mean_change(scored, known_old, known_new),
        )

    # --- what was played, and its reward ------------------------------------------------------------------------------

    def _played(self, scored: ScoredTrajectory) -> Iterator[Compared]:
        """Whether scored.jsonl has the trajectory as trajectories.jsonl has it."""
        path = self.run.trajectories_path(scored.step)
        played = next((each for each in self.run.lines(path, Trajectory) if each.id == scored.id), None)
        if played is None:
            yield Compared("trajectory", "not computed", why=f"{path} has no such line")
            return
        fields = [name for name in Trajectory.__struct_fields__ if getattr(played, name) != getattr(scored, name)]
        if not fields:
            yield Compared("trajectory", "same")
        for name in fields:
            one, other = getattr(scored, name), getattr(played, name)
            at = f"scored.jsonl and trajectories.jsonl{first_difference(one, other)}"
            yield Compared(f"trajectory.{name}", "differs", at=at)

    def _reward(self, scored: ScoredTrajectory, group: Sequence[ScoredTrajectory]) -> Iterator[Compared]:
        if scored.error is not None:
            yield Compared("reward", "same" if scored.reward is None else "differs", scored.reward, None)
            return
        judge = self.config.judge
        if isinstance(judge, RulerJudgeConfig):
            yield from rewards_of_votes(scored, judge)
        elif why := self._why_no_judge():
            yield Compared("reward", "not computed", scored.reward, why=why)
        else:
            try:
                reward = threads.run(self._ask(scored, group))
            except (JudgeError, UsageError) as error:
                yield Compared("reward", "not computed", scored.reward, why=str(error))
                return
            yield compare_numbers("reward", scored.reward, reward, EXACT)

    def _why_no_judge(self) -> str:
        """Why the judge cannot be asked again for nothing; "": it can."""
        judge = self.config.judge
        parts = list(judge.judges.values()) if isinstance(judge, BlendJudgeConfig) else [judge]
        names = set(judge.blend) if isinstance(judge, BlendJudgeConfig) else {judge.name}
        if isinstance(judge, BlendJudgeConfig) and "ruler" in names:
            return "a blend with RULER: its votes are not recorded apart"
        if any(not isinstance(part, RolloutJudgeConfig | FunctionJudgeConfig) for part in parts):
            return f"judge {judge.name!r} is not asked again"
        if any(isinstance(part, FunctionJudgeConfig) for part in parts) and self.directory is None:
            return "the judge is a function beside the configuration file; name that file with --config to run it"
        return ""

    async def _ask(self, scored: ScoredTrajectory, group: Sequence[ScoredTrajectory]) -> float:
        finished = sorted((each for each in group if each.error is None), key=lambda each: each.index)
        judge = make_judge(self.config.judge, self.loaded.directory)
        try:
            return (await judge.judge(finished))[scored.id].reward
        finally:
            await judge.close()

    # --- the learner --------------------------------------------------------------------------------------------------

    def _why_no_learner(self, step: int) -> str:
        """Why the weights of a step cannot be loaded; "": they can."""
        algorithm, base = self.config.algorithm, self.config.model.base
        if self.directory is None and algorithm is not None:
            return "the algorithm is a class beside the configuration file; name that file with --config to run it"
        if self.directory is None and ":" in base and not self.run.base.is_dir():
            return f"the base model {base} is built by code; name the configuration file with --config to run it"
        try:
            verify_checkpoint(self.run.checkpoint_path(step))
        except CheckpointError as error:
            there = ", ".join(map(str, self.run.checkpoint_steps())) or "none"
            keep = self.config.train.keep_checkpoints
            if not self.run.checkpoint_path(step).exists():
                return f"no checkpoint of step {step}: there are {there} (train.keep_checkpoints is {keep})"
            return str(error)
        return ""

    def _learner(self, step: int) -> Any:
        """The learner at a checkpoint, in this process, whatever the run had."""
        return open_learner(self.loaded, PolicySource(self.run.checkpoint_path(step), step, self.run.root))

    def _advantages_again(self, id: str) -> LearnedTrajectory | None:
        """What can be said without the weights; None: nothing."""
        if self.directory is None and self.config.algorithm is not None:
            return None
        from art_cli.learners.step_plan import advantages_again

        config = self.config
        return advantages_again(
            self.groups,
            id,
            loss=config.learns_by,
            train=config.train,
            max_tokens=config.rollout.sampling.max_tokens,
            directory=self.loaded.directory,
        )


def _loaded(run: RunDir, directory: Path | None) -> LoadedConfig:
    """The run's configuration, for a learner in one process.

    Raises RunError: no run; DataError: its config.json is no configuration.
    """
    record = run_config(run)
    if not record:
        raise RunError(f"{run.root}: not a run (no config.json)")
    record = {key: value for key, value in record.items() if key not in ("auto", "changes")}
    try:
        config = RunConfig.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", run.config_path) from None
    if getattr(config.learner, "processes", 1) > 1:
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"processes": 1})})
    return LoadedConfig(config, directory or run.root.resolve(), run.config_path)


def _groups(run: RunDir, step: int, lines: Sequence[LearnedTrajectory]) -> list[list[ScoredTrajectory]]:
    """The groups that the step trained on, in its order; those that it replays come from earlier steps' files."""
    wanted = {line.id for line in lines}
    steps = {step} | {int(match[1]) for line in lines if (match := ID.fullmatch(line.id)) is not None}
    rows = {row.id: row for each in sorted(steps) for row in run.scored(each) if row.id in wanted}
    if missing := [line.id for line in lines if line.id not in rows]:
        raise UsageError(f"{run.scored_path(step)}: lacks {missing[0]} ({len(missing)} of {len(lines)} trajectories)")
    groups: dict[str, list[ScoredTrajectory]] = {}
    for line in lines:
        groups.setdefault(rows[line.id].group_id, []).append(rows[line.id])
    return list(groups.values())


def rewards_of_votes(scored: ScoredTrajectory, judge: RulerJudgeConfig) -> Iterator[Compared]:
    """RULER's reward: each model's votes make its score, and the weighted mean of these the reward."""
    weights = [member.weight for member in judge.panel] or [1.0]
    scores = [score for score in scored.scores if score.judge == "ruler"]
    if len(scores) != len(weights):
        yield Compared("reward", "not computed", scored.reward, why=f"{len(scores)} scores of {len(weights)} models")
        return
    for score in scores:
        votes = score.votes or [score.score]
        value = median(votes) if judge.aggregate == "median" else fmean(votes)
        yield compare_numbers(f"score of {score.model}", score.score, value, EXACT)
    mean = sum(weight * score.score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
    yield compare_numbers("reward", scored.reward, min(1.0, max(0.0, mean)), EXACT)
