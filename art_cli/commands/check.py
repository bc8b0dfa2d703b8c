"""`art check`: a preflight that changes nothing: everything a run needs, tried once, each finding with its cure.

The checks go from cheap to dear; one that fails stops those that stand on it. Nothing is written outside a temporary
directory.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from art_cli import plugins, threads
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.references import check_ready
from art_cli.errors import ArtError, printable_lines
from art_cli.judges import make_judge
from art_cli.learners import Learner, load_policy, make_learner
from art_cli.learners.demos import load_demos
from art_cli.loop.choice import describe, settle
from art_cli.loop.generate import plan_groups
from art_cli.loop.sampler import open_sampler
from art_cli.model import Weights, count_parameters, find_base
from art_cli.rollouts.scenarios import load_scenarios
from art_cli.scratch import scratch
from art_cli.trajectory import Json, Trajectory, Turn, prompt, score_trajectory, sequence


class Finding(NamedTuple):
    """What one check found. Example: Finding("disk", False, "3.1 GB needed, 1.2 GB free", "free some, or ...")."""

    name: str
    is_good: bool
    message: str
    cure: str = ""


def run(*, config: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Prints every finding; raises ArtError (exit code 1) when one is bad, ConfigError (2) for the configuration."""
    loaded = load_config(config, overrides)
    check_ready(loaded, is_training=True)
    loaded = settle(loaded, "engine", "learner")
    with scratch("check") as place:
        preflight = Preflight(loaded, place)
        try:
            findings = preflight.check()
        finally:
            preflight.close()
        if as_json:
            sys.stdout.write(json.dumps([finding._asdict() for finding in findings]) + "\n")
        else:
            sys.stdout.writelines(printable_lines(_as_line(finding)) for finding in findings)
        bad = [finding.name for finding in findings if not finding.is_good]
        if bad:  # raised while the scratch directory is there, so that a log which a finding names stays
            raise ArtError(f"{config}: not ready: {', '.join(bad)}")


def _as_line(finding: Finding) -> str:
    line = f"{'ok  ' if finding.is_good else 'FAIL'} {finding.name:10s} {finding.message}\n"
    return line + (f"     {'':10s} -> {finding.cure}\n" if finding.cure else "")


@dataclass
class Preflight:
    """The checks, in order; each adds what the later ones use."""

    loaded: LoadedConfig
    scratch: Path
    scenarios: list[Json] = field(default_factory=list)
    weights: Weights | None = None
    learner: Learner | None = None
    trajectory: Trajectory | None = None

    def check(self) -> list[Finding]:
        findings = [
            Finding("config", True, f"{self.loaded.path}: composes"),
            Finding("auto", True, describe(self.loaded, "engine", "learner")),
        ]
        checks: list[tuple[str, Callable[[], Finding]]] = [
            ("scenarios", self.check_scenarios),
            ("entries", self.check_entries),
            ("model", self.check_model),
            ("rollout", self.check_rollout),
            ("tokens", self.check_tokens),
            ("update", self.check_update),
            ("disk", self.check_disk),
        ]
        for name, check in checks:
            begin = time.perf_counter()
            try:
                finding = check()
            except ArtError as error:
                return [*findings, Finding(name, False, str(error))]
            took = time.perf_counter() - begin
            findings.append(finding._replace(message=f"{finding.message} ({took:.1f} s)"))
            if not finding.is_good and name != "disk":
                break
        return findings

    def close(self) -> None:
        if self.learner is not None:
            self.learner.close()

    def check_scenarios(self) -> Finding:
        config = self.loaded.config
        self.scenarios = load_scenarios(config.rollout.scenarios, self.loaded.directory)
        counts = [f"{len(self.scenarios)} to train on"]
        if config.eval:
            held_out = load_scenarios(config.eval.scenarios, self.loaded.directory)
            counts.append(f"{len(held_out)} to evaluate on")
        if config.sft:
            counts.append(f"{len(load_demos(config.sft.demos, self.loaded.directory))} sft transcripts")
        return Finding("scenarios", True, ", ".join(counts))

    def check_entries(self) -> Finding:
        config = self.loaded.config
        threads.run(make_judge(config.judge, self.loaded.directory).close())
        if config.rollout.command:
            program = config.rollout.command[0]
            if shutil.which(program, path=None) is None and not (self.loaded.directory / program).exists():
                return Finding(
                    "entries", False, f"rollout.command: no program {program!r}", "install it or mend the path"
                )
            return Finding("entries", True, f"rollout.command {program}, judge {config.judge.name}")
        assert config.rollout.entry
        plugins.resolve(config.rollout.entry, base=self.loaded.directory)
        return Finding("entries", True, f"rollout {config.rollout.entry}, judge {config.judge.name}")

    def check_model(self) -> Finding:
        config = self.loaded.config
        base = find_base(config.model.base, directory=self.loaded.directory, built=self.scratch / "base")
        self.weights = load_policy(config, base)
        self.learner = make_learner(config, self.weights)
        size = count_parameters(self.weights.model)
        return Finding(
            "model",
            True,
            f"{config.model.base}: {size.whole / 1e6:.1f}M parameters, {size.trained / 1e6:.2f}M trained, "
            f"{self.weights.max_length} tokens of context, on {self.weights.device}",
        )

    def check_rollout(self) -> Finding:
        self.trajectory = threads.run(self._play_one())
        trajectory = self.trajectory
        if trajectory.error:
            return Finding("rollout", False, trajectory.error, "mend the rollout; it failed on the first scenario")
        reward = (
            "no reward (a judge gives it)"
            if trajectory.returned_reward is None
            else f"reward {trajectory.returned_reward:g}"
        )
        if trajectory.returned_reward is None and self.loaded.config.judge.name == "rollout":
            return Finding(
                "rollout", False, "it returned no reward, and judge is 'rollout'", "return one, or choose a judge"
            )
        if not trajectory.turns:
            return Finding(
                "rollout", False, "it made no model call", "use policy.client, or policy.base_url and api_key"
            )
        return Finding(
            "rollout", True, f"{len(trajectory.turns)} turns, {trajectory.num_sampled} sampled tokens, {reward}"
        )

    async def _play_one(self) -> Trajectory:
        played: list[Trajectory] = []
        plans = plan_groups(self.scenarios[:1], step=0, group_size=1)
        async with open_sampler(self.loaded, self.weights, checkpoint=None, step=0, logs=self.scratch) as sampler:
            await sampler.play_shown(plans, played.append, title="check")
        return played[0]

    def check_tokens(self) -> Finding:
        """Decodes and re-encodes what was recorded, and has the learner score it: contract 2 on one trajectory."""
        assert self.weights and self.learner and self.trajectory
        turns = self.trajectory.turns
        tokenizer: Any = self.weights.tokenizer
        last = prompt(turns, len(turns) - 1)
        is_same = tokenizer.encode(tokenizer.decode(last), add_special_tokens=False) == last
        gap = max(self._gap(turns, index) for index in range(len(turns)))
        num_branches = sum(turn.parent is None or turn.kept < len(sequence(turns, turn.parent)) for turn in turns) - 1
        message = f"engine and learner differ by {gap:.1e} nats at most, {num_branches} branches"
        if gap > self.loaded.config.train.max_logprob_gap:
            return Finding("tokens", False, message, "engine and learner do not compute the same model")
        cure = (
            "" if is_same else "text and tokens do not map one to one here; recorded tokens are trained on as they are"
        )
        if num_branches:
            cure = "a prompt does not extend the turn before it (edited history, or its template): slower, still right"
        return Finding("tokens", True, message, cure)

    def _gap(self, turns: Sequence[Turn], index: int) -> float:
        """Largest |engine - learner| in nats over a turn's sampled tokens; 0 where sampling cut the distribution."""
        turn = turns[index]
        if turn.is_truncated_sampling or not turn.sampled_ids:
            return 0.0
        assert self.learner
        scores = self.learner.score(sequence(turns, index), temperature=turn.temperature)
        return max(abs(a - b) for a, b in zip(scores[-len(turn.logprobs) :], turn.logprobs, strict=True))

    def check_update(self) -> Finding:
        """A step on the longest plausible rows, forward and backward, with made-up tokens."""
        assert self.weights and self.learner and self.trajectory
        config = self.loaded.config
        own_prompt = len(prompt(self.trajectory.turns, 0))
        length = min(
            self.weights.max_length, own_prompt + config.rollout.max_turns * config.rollout.sampling.max_tokens
        )
        ids = [(7 * place) % self.weights.model.config.vocab_size for place in range(length)]
        logprobs = self.learner.score(ids)
        turn = Turn(
            parent=None,
            kept=0,
            prompt_ids=ids[:1],
            sampled_ids=ids[1:],
            logprobs=logprobs,
            raw_logprobs=logprobs,
            step=0,
            temperature=1.0,
        )
        pair = [
            score_trajectory(
                Trajectory(id=f"check-{i}", group_id="check", group_size=2, index=i, turns=[turn]), float(i)
            )
            for i in range(2)
        ]
        metrics = self.learner.step([pair])
        return Finding("update", True, f"a row of {length} tokens forward and backward in {metrics.train_s:.1f} s")

    def check_disk(self) -> Finding:
        """Checkpoints that stay, one more being written, and the trajectories of every step."""
        assert self.learner and self.trajectory
        config = self.loaded.config
        checkpoint = self.scratch / "checkpoint"
        checkpoint.mkdir()
        self.learner.save(checkpoint)
        one = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        line = (
            len(json.dumps(self.trajectory.messages))
            + 40 * self.trajectory.num_sampled
            + 6 * len(sequence(self.trajectory.turns, 0))
        )
        lines = 2 * line * config.rollout.group_size * config.rollout.groups_per_step * config.train.steps
        needed = one * (config.train.keep_checkpoints + 2) + lines
        place = next(path for path in [config.runs, *config.runs.parents] if path.exists())
        free = shutil.disk_usage(place).free
        message = f"about {needed / 1e9:.2f} GB needed under {config.runs}, {free / 1e9:.1f} GB free"
        return Finding("disk", needed < free, message, "" if needed < free else "free some, or set `runs` elsewhere")
