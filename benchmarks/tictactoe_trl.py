"""Tic-tac-toe as a TRL script: the other side of benchmarks/loop.py.

    python -m benchmarks.tictactoe_trl BASE --steps 6 [--batch 32] [--cache] [--merge]     # a JSON line for each step

GRPOTrainer plays the recipe's games through its `rollout_func`: all games of a step at once, one `generate` per move.
Sizes, sampling, learning rate, adapter and the order of the scenarios are read from recipes/tictactoe/config.yaml.
What the opponent's board adds is in the completion, and left out of the loss by `env_mask`.

--batch   sequences of a micro-batch of training
--cache   keys and values are kept from move to move, which is possible as all games that go on are equally long
--merge   the adapter is merged into the base while it samples
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parent.parent / "recipes" / "tictactoe"
# what makes both sides' steps the same work: an adapter, and one update for each batch of games
SAME_WORK = [
    "model.lora={rank: 32, alpha: 64}",
    "train.learning_rate=5e-4",
    "train.decay=none",
    "train.updates_per_step=1",
    "train.epochs_per_step=1",
]


@dataclass
class Game:
    """One game, as tokens: the first prompt, then what was sampled (mask 1) and what the opponent's move added (0)."""

    opponent: Any
    board: str
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    result: str | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.completion

    def add(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.completion += ids
        self.logprobs += logprobs
        self.mask += [int(sampled)] * len(ids)


class Table:
    """Plays the games of a step: `rollout_func`."""

    def __init__(self, scenarios: dict[str, Any], tokenizer: Any, settings: Any, *, cache: bool, merge: bool) -> None:
        self.scenarios, self.tokenizer, self.settings = scenarios, tokenizer, settings
        self.has_cache, self.merges = cache, merge
        self.sample_s = 0.0
        self.steps: list[dict[str, float]] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch
        from rollout import REWARDS

        begin = time.perf_counter()
        games = [self._open(self.scenarios[name]) for name in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        with torch.inference_mode(), _merged(model) if self.merges else contextlib.nullcontext():
            self._play(games, model)
        model.train()
        rewards = [REWARDS[str(game.result)] for game in games]
        self.steps.append(
            {
                "sample_s": time.perf_counter() - begin,
                "reward": sum(rewards) / len(games),
                "games": len(games),
                "tokens_sampled": sum(sum(game.mask) for game in games),
                "tokens_trained_on": sum(len(game.ids) for game in games),
            }
        )
        return {
            "prompt_ids": [game.prompt for game in games],
            "completion_ids": [game.completion for game in games],
            "logprobs": [game.logprobs for game in games],
            "env_mask": [game.mask for game in games],
            "game_reward": rewards,
        }

    def _open(self, scenario: dict[str, Any]) -> Game:
        from game import EMPTY, RandomOpponent, show
        from rollout import SYSTEM

        opponent = RandomOpponent(scenario["seed"])
        board = EMPTY if scenario["starts"] else opponent.move(EMPTY)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": show(board)}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Game(opponent, board, self.tokenizer(text, add_special_tokens=False).input_ids)

    def _play(self, games: list[Game], model: Any) -> None:
        """All games to their ends, a move of each at a time."""
        live, cache = games, None
        while live:
            lengths = {len(game.ids) for game in live}
            assert len(lengths) == 1, lengths  # a legal move is one token and its end, and a board is always as long
            replies, logprobs, cache = self._generate([game.ids for game in live], model, cache)
            kept = []
            for place, (game, ids, logprob) in enumerate(zip(live, replies, logprobs, strict=True)):
                game.add(ids, logprob, sampled=True)
                self._answer(game, ids)
                if game.result is None:
                    kept.append(place)
            if cache is not None and kept:
                cache.crop(lengths.pop() + 1 - cache.get_seq_length())  # how many too many, negative
                cache.batch_select_indices(_tensor(kept))
            live = [live[place] for place in kept]

    def _answer(self, game: Game, ids: list[int]) -> None:
        from game import find_result, free_cells, put, show

        move = self.tokenizer.decode(ids, skip_special_tokens=True)
        if move not in free_cells(game.board):
            game.result = "illegal"
            return
        game.board = put(game.board, move, "X")
        game.result = find_result(game.board)
        if game.result is None:
            game.board = game.opponent.move(game.board)
            game.result = find_result(game.board)
        if game.result is None:
            text = f"\n<|im_start|>user\n{show(game.board)}<|im_end|>\n<|im_start|>assistant\n"
            added = self.tokenizer(text, add_special_tokens=False).input_ids
            game.add(added, [0.0] * len(added), sampled=False)

    def _generate(
        self, rows: list[list[int]], model: Any, cache: Any
    ) -> tuple[list[list[int]], list[list[float]], Any]:
        """A reply to each row, its logprobs, and the keys and values."""
        import torch
        from transformers import DynamicCache

        ids, end = _tensor(rows), self.tokenizer.eos_token_id
        if self.has_cache and cache is None:
            cache = DynamicCache()
        whole = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=self.settings.max_tokens,
            do_sample=True,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            eos_token_id=end,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = whole.sequences[:, ids.shape[1] :]
        scores = torch.stack(whole.scores, dim=1).log_softmax(-1).gather(-1, new[:, :, None])[:, :, 0]
        replies = [_until(row, end) for row in new.tolist()]
        logprobs = [row[: len(reply)] for row, reply in zip(scores.tolist(), replies, strict=True)]
        return replies, logprobs, cache


def _until(row: list[int], end: int) -> list[int]:
    return row[: row.index(end) + 1] if end in row else row


def _tensor(rows: Any) -> Any:
    import torch

    return torch.tensor(rows)


@contextlib.contextmanager
def _merged(model: Any) -> Iterator[None]:
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


def train(base: Path, *, steps: int, batch: int, cache: bool, merge: bool) -> list[dict[str, float]]:
    """Numbers of each step; `step_s` from the end of the step before to its own, as TRL's callbacks see it."""
    import datasets
    import peft
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    from art_cli.config.compose import load_config
    from art_cli.rollouts.scenarios import ScenarioOrder, load_scenarios

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(RECIPE))
    config = load_config(RECIPE / "config.yaml", [f"model.base={base}", *SAME_WORK]).config
    scenarios = {scenario["id"]: scenario for scenario in load_scenarios(config.rollout.scenarios, RECIPE)}
    order = ScenarioOrder(list(scenarios), seed=config.train.seed, shuffle=config.rollout.shuffle)
    played = [i for step in range(steps) for i in order.groups(step, config.rollout.groups_per_step)]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    table = Table(scenarios, tokenizer, config.rollout.sampling, cache=cache, merge=merge)
    clock = Clock()
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32"),
        reward_funcs=lambda completions, game_reward, **_: game_reward,
        args=_arguments(config, steps, batch),
        train_dataset=datasets.Dataset.from_list([{"prompt": list(scenarios)[i]} for i in played]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=config.model.lora.rank, lora_alpha=config.model.lora.alpha, target_modules=config.model.lora.targets
        ),
        rollout_func=table,
        callbacks=[clock.callback()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [numbers | {"step_s": seconds} for numbers, seconds in zip(table.steps, clock.seconds(), strict=True)]


class Clock:
    """When each step ended, and when the first began."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def callback(self) -> Any:
        import transformers

        times = self.times

        class Callback(transformers.TrainerCallback):
            def on_train_begin(self, *_: object, **__: object) -> None:
                times.append(time.perf_counter())

            def on_step_end(self, *_: object, **__: object) -> None:
                times.append(time.perf_counter())

        return Callback()

    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def _arguments(config: Any, steps: int, batch: int) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=config.rollout.group_size * config.rollout.groups_per_step // batch,
        num_generations=config.rollout.group_size,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, with one clip: our grpo
        learning_rate=config.train.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.train.weight_decay,
        max_grad_norm=config.train.max_grad_norm,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.train.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a directory with the policy that both sides start from")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--merge", action="store_true")
    given = parser.parse_args()
    for numbers in train(given.base, steps=given.steps, batch=given.batch, cache=given.cache, merge=given.merge):
        print(json.dumps(numbers))


if __name__ == "__main__":
    main()
