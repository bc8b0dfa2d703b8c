"""TRL's GRPOTrainer on a task of learning/curves.py: the same rollout function, scenarios, sampling and start.

    python -m benchmarks.learning.trl_side CONFIG --base DIR --start CHECKPOINT --out DIR --set learning_rate=1e-3

The rollout function is called as it is, with a client that asks TRL's model: `rollout_func` plays all attempts of a
step at once, and each `generate` answers every attempt that waits. What the environment adds between two replies is in
the completion, and left out of the loss by `env_mask`. The adapter is written as a checkpoint every few steps, so that
`art eval` plays the same evaluation with it. The last line of stdout is a JSON object: the entropy of the last step,
and the mean reward of each step. A step's attempts are trained on `num_iterations` times.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MICRO_BATCH = 32  # attempts in one forward pass of training, unless --batch says another number


class TurnLimit(Exception):
    """The attempt asked for more replies than `rollout.max_turns`."""


@dataclass
class Attempt:
    """One attempt as tokens: the first prompt, then what was sampled (mask 1) and what the environment added (0).

    It is the `policy` that the rollout function gets; it has one sequence, so each prompt must go on from the last.
    """

    player: "Player"
    prompt: list[int] = field(default_factory=list)
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    num_turns: int = 0
    model: str = "policy"
    _text: str = ""  # of all tokens so far, without the end of the last reply

    @property
    def client(self) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    def state(self, key: object) -> None:
        """What our credit per step compares; TRL has none."""

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    async def _create(self, *, messages: Sequence[Any], **_: object) -> Any:
        if self.num_turns == self.player.max_turns:
            raise TurnLimit
        self.num_turns += 1
        self._extend(self.player.render(messages))
        content = await self.player.reply(self)
        self._text += content
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=content))])

    def _extend(self, text: str) -> None:
        """Adds what the text of a prompt has more than the tokens so far."""
        assert text.startswith(self._text), "the prompt does not go on from the one before it"
        added = text[len(self._text) :]
        if self.completion and self.completion[-1] == self.player.tokenizer.eos_token_id:
            added = added.removeprefix(self.player.tokenizer.eos_token)
        self._text = text
        if not self.prompt:
            self.prompt = self.player.tokenize(added)
        else:
            ids = self.player.tokenize(added)
            self.add(ids, [0.0] * len(ids), sampled=False)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.completion += ids
        self.logprobs += logprobs
        self.mask += [int(sampled)] * len(ids)


class Player:
    """Plays the attempts of a step: `rollout_func`."""

    def __init__(self, rollout: Any, scenarios: dict[str, Any], tokenizer: Any, settings: Any) -> None:
        """`settings` is the configuration's `rollout` section."""
        self.rollout, self.scenarios, self.tokenizer = rollout, scenarios, tokenizer
        self.sampling, self.max_turns, self.limit_reward = settings.sampling, settings.max_turns, settings.limit_reward
        self._model: Any = None
        self._waiting: list[tuple[Attempt, asyncio.Future[str]]] = []
        self._num_live = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._model.eval()
        with torch.inference_mode(), _merged(self._model):
            attempts = asyncio.run(self._play(prompts))
        self._model.train()
        return {
            "prompt_ids": [attempt.prompt for attempt in attempts],
            "completion_ids": [attempt.completion for attempt in attempts],
            "logprobs": [attempt.logprobs for attempt in attempts],
            "env_mask": [attempt.mask for attempt in attempts],
            "outcome": [attempt.reward for attempt in attempts],
        }

    async def _play(self, names: Sequence[str]) -> list[Attempt]:
        attempts = [Attempt(self) for _ in names]
        self._num_live = len(attempts)
        async with asyncio.TaskGroup() as group:
            for attempt, name in zip(attempts, names, strict=True):
                group.create_task(self._attempt(attempt, self.scenarios[name]))
        return attempts

    async def _attempt(self, attempt: Attempt, scenario: dict[str, Any]) -> None:
        try:
            outcome = await self.rollout(attempt, dict(scenario))
            attempt.reward = float(getattr(outcome, "reward", outcome))
        except TurnLimit:
            attempt.reward = self.limit_reward
        self._num_live -= 1
        self._answer_if_all_wait()

    def render(self, messages: Sequence[Any]) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    async def reply(self, attempt: Attempt) -> str:
        """The text that the model says next. It comes when all attempts that go on wait for one."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((attempt, future))
        self._answer_if_all_wait()
        return await future

    def _answer_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._num_live:
            return
        waiting, self._waiting = self._waiting, []
        for (attempt, future), (ids, logprobs) in zip(
            waiting, self._generate([a.ids for a, _ in waiting]), strict=True
        ):
            attempt.add(ids, logprobs, sampled=True)
            future.set_result(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _generate(self, rows: list[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
        """A reply to each row, and its logprobs."""
        import torch

        pad, end, longest = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        attended = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        whole = self._model.generate(
            input_ids=ids,
            attention_mask=attended,
            max_new_tokens=self.sampling.max_tokens,
            do_sample=True,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            eos_token_id=end,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = whole.sequences[:, longest:]
        logprobs = torch.stack(whole.scores, dim=1).log_softmax(-1).gather(-1, new[:, :, None])[:, :, 0]
        for row, values in zip(new.tolist(), logprobs.tolist(), strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            yield row[:length], values[:length]


@contextlib.contextmanager
def _merged(model: Any) -> Iterator[None]:
    """While inside, an adapter is part of the weights, which samples faster. Whole weights stay as they are."""
    if not hasattr(model, "merge_adapter"):
        yield
        return
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Trains and writes checkpoints to `given.out`, a run's directory."""
    import datasets
    import peft
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    from art_cli.config.compose import load_config
    from art_cli.rollouts.scenario_files import ScenarioOrder, load_scenarios
    from art_cli.runtime.plugins import resolve

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    loaded = load_config(given.config, given.overrides)
    config = loaded.config.rollout
    assert config.entry is not None, "a rollout function"
    scenarios = {scenario["id"]: scenario for scenario in load_scenarios(config.scenarios, loaded.directory)}
    order = ScenarioOrder(list(scenarios), seed=given.seed, shuffle=config.shuffle)
    played = [i for step in range(given.steps) for i in order.groups(step, config.groups_per_step)]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(given.base)
    has_adapter = (given.start / "adapter_config.json").exists()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        given.base if has_adapter else given.start, dtype="float32"
    )
    if has_adapter:
        model = peft.PeftModel.from_pretrained(model, given.start, is_trainable=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, outcome, **_: outcome,
        args=_arguments(config, given),
        train_dataset=datasets.Dataset.from_list([{"prompt": list(scenarios)[i]} for i in played]),
        processing_class=tokenizer,
        rollout_func=Player(resolve(config.entry, base=loaded.directory), scenarios, tokenizer, config),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(_saver(given))
    save(trainer.model, given, 0)
    trainer.train()
    said = trainer.state.log_history
    rewards = [line["reward"] for line in said if "reward" in line]
    return {"entropy": [line["entropy"] for line in said if "entropy" in line][-1], "rewards": rewards}


def _saver(given: argparse.Namespace) -> Any:
    import transformers

    class Saver(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
            step, rest = divmod(state.global_step, args.num_iterations)
            if rest == 0 and (step % given.every == 0 or step == given.steps):
                save(model, given, step)

    return Saver()


def save(model: Any, given: argparse.Namespace, step: int) -> None:
    from art_cli.runs.manifest import Manifest, new_checkpoint
    from art_cli.runs.run_dir import RunDir

    manifest = Manifest(step=step, base=str(given.base), config_hash="")
    with new_checkpoint(RunDir(given.out).checkpoint_path(step), manifest) as directory:
        if hasattr(model, "merge_adapter"):
            model.save_pretrained(directory, selected_adapters=["default"])
        else:
            model.save_pretrained(directory)


def _arguments(config: Any, given: argparse.Namespace) -> Any:
    """TRL's defaults, but for what makes the comparison equal and what `--set` sets."""
    from trl.trainer.grpo_config import GRPOConfig

    settings: dict[str, Any] = {
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "max_completion_length": config.max_turns * config.sampling.max_tokens,  # what dr_grpo divides by
    }
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=given.steps * int(dict(given.set).get("num_iterations", 1)),
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=config.group_size * config.groups_per_step // given.batch,
        num_generations=config.group_size,
        temperature=config.sampling.temperature,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=given.seed,
        **settings | dict(given.set),
    )


def setting(text: str) -> tuple[str, Any]:
    """A setting of GRPOConfig. Example: "learning_rate=1e-3" is ("learning_rate", 0.001)."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the configuration: key=value")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="the adapter or the whole weights to start from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=MICRO_BATCH, help="attempts in one forward pass of training")
    parser.add_argument("--set", type=setting, action="append", default=[], help="of GRPOConfig: key=value")
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
