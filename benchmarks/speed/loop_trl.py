"""The tasks of benchmarks/speed/loop_shapes.py as a TRL script: the other side of benchmarks/speed/loop.py.

    python -m benchmarks.speed.loop_trl SHAPE BASE --steps 6 [--batch 32] [--cache] [--merge]  # a JSON line a step
    python -m benchmarks.speed.loop_trl SHAPE BASE --steps 28 --until 0.9 train.seed=1  # other settings, an early end

GRPOTrainer plays the episodes through its `rollout_func`: all of a step at once, one `generate` per turn. Sizes,
sampling, learning rate, adapter and the order of the scenarios are read from the shape's configuration. What the
environment says is in the completion, and left out of the loss by `env_mask`.

--batch   sequences of a micro-batch of training
--cache   keys and values are kept from turn to turn
--merge   the adapter is merged into the base while it samples
--bf16    the base is in bfloat16 and products are autocast, as ours has it on a CPU with AMX (model.dtype: auto)
--until   ends after the first step whose attempts have this mean reward
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed.loop_shapes import SHAPES, Episode, Shape


class Table:
    """Plays the episodes of a step: `rollout_func`.

    The rows of a batch are equally long, because keys and values are kept: where an episode has fewer tokens than the
    longest one, padding that nothing attends to stands before what the environment says. Training sees none of it.
    """

    def __init__(
        self, shape: Shape, scenarios: dict[str, Any], tokenizer: Any, settings: Any, *, cache: bool, merge: bool
    ) -> None:
        self.shape, self.scenarios, self.tokenizer, self.settings = shape, scenarios, tokenizer, settings
        self.has_cache, self.merges = cache, merge
        self.steps: list[dict[str, float]] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        begin = time.perf_counter()
        episodes = [self._open(self.scenarios[name]) for name in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        with torch.inference_mode(), _merged(model) if self.merges else contextlib.nullcontext():
            self._play(episodes, model)
        model.train()
        rewards = [episode.reward or 0.0 for episode in episodes]
        self.steps.append(
            {
                "sample_s": time.perf_counter() - begin,
                "reward": sum(rewards) / len(episodes),
                "games": len(episodes),
                "tokens_sampled": sum(sum(episode.mask) for episode in episodes),
                "tokens_trained_on": sum(len(episode.ids) for episode in episodes),
            }
        )
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "episode_reward": rewards,
        }

    def _open(self, scenario: dict[str, Any]) -> Episode:
        messages, state = self.shape.task.begin(scenario)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return Episode(scenario, self._ids(text), state)

    def _play(self, episodes: list[Episode], model: Any) -> None:
        """All episodes to their ends, a turn of each at a time."""
        live, cache = episodes, None
        rows = self._padded([[]] * len(live), [episode.prompt for episode in live])
        while live:
            width = len(rows[0].ids)
            replies, logprobs, cache = self._generate(rows, model, cache)
            added = []
            for episode, ids, logprob in zip(live, replies, logprobs, strict=True):
                episode.add(ids, logprob, sampled=True)
                added.append(self._answer(episode, ids))
            kept = [place for place, episode in enumerate(live) if episode.reward is None]
            if not kept:
                return
            longest = max(len(replies[place]) for place in kept)
            if cache is not None:
                if (too_many := cache.get_seq_length() - (width + longest - 1)) > 0:
                    cache.crop(-too_many)
                cache.batch_select_indices(_tensor(kept))
            ends = self._padded([replies[place] for place in kept], [added[place] for place in kept])
            rows = [rows[place].then(end) for place, end in zip(kept, ends, strict=True)]
            live = [live[place] for place in kept]

    def _padded(self, starts: Sequence[list[int]], ends: Sequence[list[int]]) -> list["Row"]:
        """Rows of a start, padding and an end, all of them equally long."""
        width = max(map(len, starts)) + max(map(len, ends))
        rows = []
        for start, end in zip(starts, ends, strict=True):
            gap = width - len(start) - len(end)
            rows.append(
                Row(start + [self.tokenizer.pad_token_id] * gap + end, [1] * len(start) + [0] * gap + [1] * len(end))
            )
        return rows

    def _answer(self, episode: Episode, ids: list[int]) -> list[int]:
        """What the environment adds to the episode; nothing: it has ended."""
        said = self.shape.task.answer(episode, self.tokenizer.decode(ids, skip_special_tokens=True))
        if said is None:
            return []
        end = "" if ids[-1] == self.tokenizer.eos_token_id else "<|im_end|>"
        added = self._ids(f"{end}\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
        episode.add(added, [0.0] * len(added), sampled=False)
        return added

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _generate(self, rows: list["Row"], model: Any, cache: Any) -> tuple[list[list[int]], list[list[float]], Any]:
        """A reply to each row, its logprobs, and the keys and values."""
        import torch
        from transformers import DynamicCache

        ids, end = _tensor([row.ids for row in rows]), self.tokenizer.eos_token_id
        if self.has_cache and cache is None:
            cache = DynamicCache()
        whole = model.generate(
            input_ids=ids,
            attention_mask=_tensor([row.mask for row in rows]),
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


class Row(NamedTuple):
    """An episode in a batch: its tokens with padding, and which of them are attended to."""

    ids: list[int]
    mask: list[int]

    def then(self, other: "Row") -> "Row":
        return Row(self.ids + other.ids, self.mask + other.mask)


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


def train(
    shape: Shape,
    base: Path,
    given: Sequence[str] = (),
    *,
    steps: int,
    batch: int,
    cache: bool,
    merge: bool,
    bf16: bool = False,
    until: float | None = None,
) -> None:
    """Prints the numbers of each step when it ends; `step_s` counts from the end of the step before.

    `given` are settings in place of the shape's. It ends early after a step whose mean reward is at least `until`.
    """
    import datasets
    import peft
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    from art_cli.config.compose import load_config
    from art_cli.rollouts.scenario_files import ScenarioOrder, load_scenarios

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(shape.project))
    config = load_config(shape.config, [f"model.base={base}", *(given or shape.settings)]).config
    scenarios = {scenario["id"]: scenario for scenario in load_scenarios(config.rollout.scenarios, shape.project)}
    order = ScenarioOrder(list(scenarios), seed=config.train.seed, shuffle=config.rollout.shuffle)
    played = [i for step in range(steps) for i in order.groups(step, config.rollout.groups_per_step)]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    table = Table(shape, scenarios, tokenizer, config.rollout.sampling, cache=cache, merge=merge)
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16" if bf16 else "float32"),
        reward_funcs=lambda completions, episode_reward, **_: episode_reward,
        args=_arguments(config, steps, batch, bf16=bf16),
        train_dataset=datasets.Dataset.from_list([{"prompt": list(scenarios)[i]} for i in played]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=config.model.lora.rank, lora_alpha=config.model.lora.alpha, target_modules=config.model.lora.targets
        ),
        rollout_func=table,
        callbacks=[_teller(table, config.train.epochs_per_step, until)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def _teller(table: Table, epochs: int, until: float | None) -> Any:
    """A callback that prints a JSON line for each step. TRL counts each of a step's `epochs` as one."""
    import transformers

    class Teller(transformers.TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if state.global_step % epochs == 0:
                numbers, ended = table.steps[-1], time.perf_counter()
                print(json.dumps(numbers | {"step_s": ended - self.began}), flush=True)
                self.began = ended
                control.should_training_stop |= until is not None and numbers["reward"] >= until

    return Teller()


def _arguments(config: Any, steps: int, batch: int, *, bf16: bool) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=steps * config.train.epochs_per_step,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=config.rollout.group_size * config.rollout.groups_per_step // batch,
        num_generations=config.rollout.group_size,
        num_iterations=config.train.epochs_per_step,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, with one clip: our grpo
        learning_rate=config.train.rate,
        lr_scheduler_type="constant" if config.train.decay == "none" else config.train.decay,
        weight_decay=config.train.weight_decay,
        max_grad_norm=config.train.max_grad_norm,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.train.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("base", type=Path, help="a directory with the policy that both sides start from")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--until", type=float)
    parser.add_argument("settings", nargs="*", help="key=value in place of the shape's settings")
    given = parser.parse_intermixed_args()
    settings = {
        "steps": given.steps,
        "batch": given.batch,
        "cache": given.cache,
        "merge": given.merge,
        "bf16": given.bf16,
    }
    train(SHAPES[given.shape], given.base, given.settings, until=given.until, **settings)


if __name__ == "__main__":
    main()
