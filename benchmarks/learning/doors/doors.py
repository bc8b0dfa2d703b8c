"""The doors: a made task in which the first of six replies decides, and the others are noise.

A letter is shown, and one of eight doors is right for it. What stands behind the right one is "+", behind the others
"-", and five replies follow that change nothing, whatever they are. The reward is 1 for the right door, else 0.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_cli import Policy

LETTERS = "abcdefgh"
NUM_WALKS = 5  # replies after the door


async def rollout(policy: Policy, scenario: dict[str, Any]) -> float:
    shown, right = scenario["letter"], LETTERS[(LETTERS.index(scenario["letter"]) + 3) % len(LETTERS)]
    messages: list[Any] = [{"role": "user", "content": shown}]
    is_right = False
    for turn in range(1 + NUM_WALKS):
        policy.state(f"{turn} {messages[-1]['content']}")
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        said = reply.choices[0].message.content or ""
        is_right = said == right if turn == 0 else is_right
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+" if is_right else "-"}]
    return float(is_right)


def scenarios() -> Iterator[dict[str, Any]]:
    for number in range(2000):
        yield {"id": f"door-{number}", "letter": LETTERS[number % len(LETTERS)]}


def demos() -> list[dict[str, Any]]:
    """Random letters; they show what a reply looks like, and nothing of the doors."""
    draw = random.Random(0)
    made = []
    for _ in range(640):
        messages: list[Any] = []
        for turn in range(1 + NUM_WALKS):
            seen = draw.choice(LETTERS) if turn == 0 else draw.choice("+-")
            messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": draw.choice(LETTERS)}]
        made.append({"messages": messages})
    return made


def build(directory: Path) -> None:
    """Writes a Qwen3 of 100,000 seeded random parameters and the tokenizer of `builtin:tiny`'s kind, by bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template="{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}",
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(wrapped),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    model.save_pretrained(directory)
    wrapped.save_pretrained(directory)
