"""Runs and files for tests of the page of art view: written through the house's own writers, without any model."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from art_cli.runs.durable import LineWriter
from art_cli.runs.promise import Doubt, Measured, Pilot, Promise, forecast
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, ScoredTrajectory, Trajectory, Turn, score_trajectory
from tests.support.records.runs import write_run

GROUPS, ATTEMPTS, STEPS = 6, 4, 3
COLOURS = ("red", "green", "blue", "amber")
SYSTEM = "Name the colour of the thing ."
WORDS = list(
    dict.fromkeys([*SYSTEM.split(), "<|im_start|>", "<|im_end|>", "thing", "is", "it", *COLOURS, *map(str, range(200))])
)


def write_viewed_run(root: Path, *, steps: int = STEPS) -> RunDir:
    """A run of `steps` steps with groups of attempts, two turns each; a tokenizer stands beside it."""
    run = write_run(root, steps=steps, every=1)
    tokenizer().save(str(_made(root / "base") / "tokenizer.json"))
    for step in range(steps):
        write_step(run, step)
    return run


def write_promise(run: RunDir, *, steps: int = STEPS) -> Promise:
    """The promise of a run of so many steps: one doubt, whose text is hostile, and two pilots, one of which failed."""
    pilots = [Pilot(rate=0.0005, kl=0.0123, clip_fraction=0.1, seconds=2.0), Pilot(0.002, None, None, 3.0)]
    found = Measured(group_tokens=[100, 300], num_attempts=256, sampling_s=4.0, judging_s=1.0, training_s=2.0,
                     reward_mean=0.25, reward_best=0.5, pilots=pilots, judge_usd=0.5)  # fmt: skip
    promise = Promise(
        config_hash="0123",
        measured=found,
        doubts=[Doubt("too_hard", f"<b>no</b> attempt{BIDI}got a reward", "easier scenarios")],
        settings={"train.learning_rate": "0.0005"},
        reasons={"train.learning_rate": "a step moves the policy by 0.0123 nats per token"},
        steps=steps,
        evaluations=2,
        expected=forecast(found, steps=steps, evaluations=2, eval_attempts=128, usd_per_hour=0.0),
    )
    run.write_promise(promise)
    return promise


def write_step(run: RunDir, step: int) -> list[ScoredTrajectory]:
    attempts = [attempt(step, group, index) for group in range(GROUPS) for index in range(ATTEMPTS)]
    append(run.scored_path(step), attempts)
    return attempts


def append(path: Path, records: Sequence[Trajectory]) -> None:
    with LineWriter(path) as writer:
        for record in records:
            writer.append(record)


def tokenizer() -> Tokenizer:
    """One token per word and space."""
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def attempt(step: int, group: int, index: int) -> ScoredTrajectory:
    """Attempt `index` names the colour `index`, first alone, then again; in group 0 attempt 3 fails.

    The first two attempts of a group begin with the same word, so that the group's tree parts twice.
    """
    draw = random.Random(f"{step} {group} {index}")
    first, second = COLOURS[max(0, index - 1)], COLOURS[index]
    asked, again = f"thing {group} is", f"is it {group}"
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": first, "tool_calls": [call("look", {"thing": group})]},
        {"role": "tool", "content": again, "tool_call_id": "c0"},
        {"role": "assistant", "content": second},
    ]
    turns = [
        turn(step, None, f"<|im_start|> {SYSTEM} <|im_end|> <|im_start|> {asked} <|im_end|>", first, draw),
        turn(step, 0, f"<|im_start|> {again} <|im_end|>", second, draw),
    ]
    has_failed = group == 0 and index == 3
    made = Trajectory(
        id=f"s{step:04d}-g{group:04d}-a{index:02d}", group_id=f"s{step:04d}-g{group:04d}", group_size=ATTEMPTS,
        index=index, step=step, scenario={"id": f"thing-{group}", "question": asked}, messages=messages, turns=turns,
        metrics={"num_turns": 2, "named": float(index)}, returned_reward=None if has_failed else index / 4,
        error="timeout: took 600 s" if has_failed else None, duration_s=1.5, started_at=1.7e9,
    )  # fmt: skip
    words = f"The answer {second} names the thing {group}."
    scores = [Score(judge="ruler", model="rule", score=index / 4, explanation=words, votes=[0.25, 0.5], spread=0.125)]
    return score_trajectory(made, None if has_failed else index / 4, [] if has_failed else scores)


def turn(step: int, parent: int | None, asked: str, said: str, draw: random.Random) -> Turn:
    sampled = ids(f"{said} <|im_end|>")
    logprobs = [-draw.uniform(0.01, 5.0) for _ in sampled]
    kept = 0 if parent is None else 2 + len(SYSTEM.split()) + 2 + 3 + 2
    return Turn(parent=parent, kept=kept, prompt_ids=ids(asked), sampled_ids=sampled, logprobs=logprobs,
                raw_logprobs=logprobs, step=step, temperature=1.0)  # fmt: skip


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


# --- hostile text -----------------------------------------------------------------------------------------------------

SCRIPT = "<script>document.title = 'owned'; window.owned = 1</script><img src=x onerror='window.owned = 1'>"
BIDI = "user\u202egnihtemos\u2066 else\u2069 \u200bhidden\ufeff \u0007bell"


def hostile_messages() -> dict[str, list[dict[str, Any]]]:
    """Conversations by name, each of which has broken some page: markup, half characters, sheer size."""
    calls = [call(f"tool_{place}", {"n": place}) for place in range(10_000)]
    reply: dict[str, Any] = {"role": "assistant", "content": "ok"}
    parts: list[Any] = [{"type": "image_url"}, {"type": "text", "text": "seen"}, 7]
    replies = [
        {"role": role, "content": f"message {place}"} for place in range(5_000) for role in ("user", "assistant")
    ]
    return {
        "script": [{"role": SCRIPT, "content": f"</script>{SCRIPT}]]>--><!--<script>"}, reply | {"content": SCRIPT}],
        "bidi": [{"role": "user", "content": BIDI}, reply],
        "long": [{"role": "user", "content": "x" * 1_000_000}, reply],
        "calls": [{"role": "user", "content": "go"}, reply | {"content": None, "tool_calls": calls}],
        "many": replies,
        "odd": [{"role": "user", "content": parts}, {"content": None}],
    }


def write_hostile(path: Path) -> None:
    lines = [json.dumps({"messages": messages, "id": name}) for name, messages in hostile_messages().items()]
    half = r'{"messages": [{"role": "user", "content": "half \ud800 a pair \udfff"}, {"role": "assistant"}]}'
    path.write_text("\n".join([*lines, half]) + "\n", encoding="utf-8")


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
