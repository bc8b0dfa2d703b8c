"""Builds the smallest real policy: a seeded two-layer Qwen3 and a byte-level tokenizer with a chat template.

Everything is made by code, nothing is read or downloaded. About 40k parameters, float32, on the CPU.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from art_cli.models.builtin_models import MARKERS, SPECIAL, chat_template
from art_cli.models.weights import Weights

CHAT_TEMPLATE = chat_template()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0 to 255), then the special tokens, then the tool markers: 265."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocab: int = 265, *, layers: int = 2, hidden: int = 32, tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        initializer_range=0.2,  # far from uniform: a wrong mask or position then shows in every logprob
    )


def save_tiny_base(directory: Path, *, hidden: int = 64) -> str:
    """Writes a base model of seed 0 and its tokenizer as a transformers directory, and says where."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(tiny_config(hidden=hidden)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def tiny_weights(seed: int = 0, lora_rank: int | None = 4, vocab: int = 265, **shape: int) -> Weights:
    """A policy with random weights of that seed; with an adapter its B is random too, so that it changes the logits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config(vocab, **shape)
        model = Qwen3ForCausalLM(config)
        if lora_rank is not None:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
    return Weights(
        model=model.eval(),
        tokenizer=tiny_tokenizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=config.max_position_embeddings,
        base="tiny",
        has_adapter=lora_rank is not None,
    )
