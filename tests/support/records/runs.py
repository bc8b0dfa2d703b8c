"""Runs written through RunDir without any model: metrics and evaluations as a run of tic-tac-toe has them."""

import json
import random
from pathlib import Path
from typing import Any

from art_cli.runs.run_dir import Evaluation, RunDir

GAMES = 200  # scenarios of an evaluation
STEPS, EVERY = 24, 4
CONFIG: dict[str, Any] = {
    "name": "mine", "model": {"base": "builtin:tiny"}, "engine": {"name": "embedded"}, "learner": {"name": "torch"},
    "judge": {"name": "rollout"}, "loss": {"name": "grpo"}, "train": {"steps": STEPS, "learning_rate": 5e-4},
}  # fmt: skip


def write_run(
    root: Path,
    *,
    seed: int = 0,
    collapses_at: int | None = None,
    steps: int = STEPS,
    every: int | None = EVERY,
    until: int | None = None,
    judge_usd: float | None = None,
) -> RunDir:
    """A run that learns: wins rise from 0.3 to 0.8 within two thirds of it, entropy falls from 0.9 to 0.5 nats.

    From the update `collapses_at` on, wins fall to 0.4 within 4 updates, entropy to 0.05, groups without signal rise to
    0.8, and that update's gradient norm is 9. `until` is the last update that was made.
    """
    draw, run = random.Random(seed), RunDir(root)
    root.mkdir(parents=True)
    run.config_path.write_text(json.dumps(CONFIG | {"train": {"steps": steps, "learning_rate": 5e-4}}))
    for step in range(steps + 1 if until is None else until + 1):
        fallen = 0.0 if collapses_at is None else min(1.0, max(0.0, (step - collapses_at + 1) / 4))
        win = (0.3 + 0.5 * min(1.0, step / steps * 1.5)) * (1 - fallen) + 0.4 * fallen
        if every and step % every == 0:
            rewards = {f"game-{game}": float(draw.random() < win) for game in range(GAMES)}
            run.write_evaluation(step, Evaluation(seconds=2.0, values={"reward": rewards}))
            run.append_metrics(step, "eval", {"reward": sum(rewards.values()) / GAMES, "failed": 0.0})
        if step < steps and (until is None or step < until):
            run.append_metrics(step, "train", _train(draw, step, steps, win, fallen, judge_usd) | {
                "grad_norm": 9.0 if step + 1 == collapses_at else draw.uniform(0.2, 0.5)})  # fmt: skip
    return run


def _train(
    draw: random.Random, step: int, steps: int, win: float, fallen: float, judge_usd: float | None
) -> dict[str, float]:
    judged = {} if judge_usd is None else {"judge_calls": 32.0, "judge_tokens": 6400.0, "judge_usd": judge_usd}
    return {
        "reward_mean": win + draw.gauss(0, 0.03),
        "no_signal_share": (0.1 + 0.2 * step / steps) * (1 - fallen) + 0.8 * fallen,
        "entropy": (0.9 - 0.4 * step / steps) * (1 - fallen) + 0.05 * fallen,
        "clip_fraction": 0.01, "logprob_change": 0.02, "logprob_gap": 1e-6,
        "num_trajectories": 256.0, "num_failed": 2.0, "failed.timeout": 2.0,
        "num_limited": 1.0, "tokens_sampled": 1600.0, "turns": 900.0,
        "sample_s": 3.0, "judge_s": 0.5, "train_s": 1.5, **judged,
    }  # fmt: skip
