"""The loop as a TRL script: GRPOTrainer with vLLM colocated; on a CPU transformers samples.

Run by benchmarks/gpu/loop.py with a JSON object; prints one. Exit code 3: this Python has no TRL, or no vLLM that its
TRL supports, and a line says which. It imports nothing of art, so that any Python with TRL can run it.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

from benchmarks.gpu.memory import watched
from benchmarks.gpu.task import prompts, reward


def main() -> None:
    told = json.loads(sys.argv[1])
    answer = os.dup(1)  # TRL and vLLM print too
    os.dup2(2, 1)
    if (reason := missing(has_gpu=told["has_gpu"])) is not None:
        os.write(answer, f"{reason}: make setup-trl, or name a Python in ART_TRL_PYTHON\n".encode())
        raise SystemExit(3)
    with watched() as memory:
        figures = train(told)
    os.write(answer, json.dumps(figures | {"memory_gb": memory.gb}).encode() + b"\n")


def missing(*, has_gpu: bool) -> str | None:
    """Returns what this Python lacks for the loop, in one line, or None. TRL itself only warns of another vLLM."""
    if importlib.util.find_spec("trl") is None:
        return "no TRL in this Python"
    if not has_gpu:
        return None
    if importlib.util.find_spec("vllm") is None:
        return "TRL's Python has no vLLM"
    from trl.import_utils import is_vllm_available

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_vllm_available()
    unsupported = [str(each.message) for each in caught if "supports vLLM versions" in str(each.message)]
    return unsupported[0].partition("installed")[0].strip() if unsupported else None


def train(told: dict[str, Any]) -> dict[str, Any]:
    import datasets
    import peft
    import transformers
    from trl.trainer.grpo_trainer import GRPOTrainer

    warnings.simplefilter("ignore")
    has_gpu = told["has_gpu"]
    times: list[float] = []
    tokens: list[int] = []
    rewards: list[float] = []

    def score(completions: Any, completion_ids: Any, **_: object) -> list[float]:
        found = [reward(completion[0]["content"]) for completion in completions]
        tokens.append(sum(map(len, completion_ids)))
        rewards.append(statistics.mean(found))
        return found

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    texts = prompts(told["prompts"] * told["steps"], told["prompt_tokens"])
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(told["base"], dtype=told["dtype"]),
        reward_funcs=score,
        args=_arguments(told, has_gpu=has_gpu),
        train_dataset=datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        processing_class=transformers.AutoTokenizer.from_pretrained(told["base"]),
        peft_config=peft.LoraConfig(r=told["rank"], lora_alpha=2 * told["rank"], target_modules="all-linear"),
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    walls = [after - before for before, after in zip(times, times[1:], strict=False)]
    num_calls = len(tokens) // told["steps"]  # of the reward function in a step: one for each micro-batch, or one
    per_step = [sum(tokens[i : i + num_calls]) for i in range(0, len(tokens), num_calls)]
    step_s, num_tokens = statistics.median(walls), statistics.median(per_step[1:])
    return {
        "step_s": step_s,
        "step_s_range": [min(walls), max(walls)],
        "attempts": told["prompts"] * told["attempts"],
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / step_s,
        "reward": statistics.mean(rewards),
        "batch": told["batch"],
        "samples_by": "vLLM, colocated" if has_gpu else "transformers, as there is no GPU",
    }


def _arguments(told: dict[str, Any], *, has_gpu: bool) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    colocated: dict[str, Any] = {}
    if has_gpu:
        colocated = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,  # its share beside the trainer, which keeps its own
            "vllm_max_model_length": 2 * (told["prompt_tokens"] + told["new_tokens"]),
            "vllm_enable_sleep_mode": False,  # the card holds both, and waking takes seconds
            "vllm_importance_sampling_correction": False,
        }
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=told["steps"],
        per_device_train_batch_size=told["batch"],
        gradient_accumulation_steps=told["prompts"] * told["attempts"] // told["batch"],
        num_generations=told["attempts"],
        max_completion_length=told["new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, with one clip: our grpo
        learning_rate=told["learning_rate"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=told["dtype"] == "bfloat16",
        use_cpu=not has_gpu,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **colocated,
    )


if __name__ == "__main__":
    main()
