"""Models that are made by code and need no hub: `model.base: builtin:tiny`

    tiny    a Qwen3 of a million parameters with seeded random weights, for trying an agent, a judge or a machine

It uses ChatML with tools in the Hermes format. What it samples is noise until `art sft` or training has taught it.
Each function writes a transformers directory, the same bytes each time.
"""

from pathlib import Path
from typing import Any

BUILTIN_MODELS = ("tiny",)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]


def tiny(directory: Path) -> None:
    """Writes the model `builtin:tiny` into the directory: weights, configuration and tokenizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(_tiny_config(tokenizer))
        torch.nn.init.normal_(
            model.model.embed_tokens.weight, std=0.3
        )  # the head is tied to it, so that logits are not all near 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def words() -> list[str]:
    """The commonest words of English text. The tokenizer makes each of them one token, and any other text bytes."""
    return _read("builtin_words.txt").split()


def chat_template() -> str:
    """ChatML with tools as Qwen 2.5 and Hermes write them: definitions in the system message, calls as tagged JSON."""
    return _read("builtin_chat_template.jinja").removesuffix("\n")


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def make_tokenizer() -> Any:
    """A transformers tokenizer of bytes and common words, with the special tokens of ChatML and tool markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{word} {word}" for word in words() for _ in range(2)], trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
    )


def _tiny_config(tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
