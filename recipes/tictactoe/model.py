"""Makes the base model from nothing: a small Qwen3 with seeded random weights, and a tokenizer for it.

About 1.2 million parameters. A base from a hub needs none of this: `model: {base: Qwen/Qwen3-0.6B}`.
"""

from pathlib import Path

import torch
from rollout import SYSTEM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# ChatML, as Qwen writes it. What ends a reply is sampled; the line break after it comes with the next prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def build(directory: Path) -> None:
    """Writes a transformers directory: the same bytes each time."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(make_config(tokenizer))
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # tied to the head: wide enough to tell apart
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=100.0,  # a game is 200 tokens: what matters is which board is the last one
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the words of the system prompt as one token each; so any text can be said, and a move is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SYSTEM, "system", "user", "assistant"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
