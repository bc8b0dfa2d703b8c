"""The round trip through a GGUF file: how far logprobs move between a model and what transformers reads back.

    python -m benchmarks.serving.gguf   # random Llama, Qwen3 and Gemma 3, and SmolLM2 if its package is installed
    python -m benchmarks.serving.gguf --model smollm2-135m

Each model is exported in each kind by the function behind `art export --gguf`, read back, and compared on texts of its
own sampling. The random models are a few million parameters of the real shapes of a head, with a byte-level tokenizer
of Qwen's kind, or for Gemma one with byte fallback; their weights have the spread that training begins with.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.real_model import smollm2

KINDS = ("f16", "q8_0", "q4_0")
FAMILIES, REAL = ("llama", "qwen3", "gemma3"), "smollm2-135m"
SAMPLES, TOKENS, GREEDY = 8, 64, 64
WORDS = "the policy of a model moves toward what its judge prefers, one step after another; 3 of 12 groups are equal. "


def byte_level_tokenizer() -> Any:
    """Returns a tokenizer that splits text as Qwen's does, with ChatML."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from art_cli.models.builtin_models import CHAT_TEMPLATE, SPECIAL
    from art_cli.models.gguf_file import SPLITS

    split = next(parts[0] for parts, name in SPLITS.items() if name == "qwen2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS * 2], trainer)
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def gemma_tokenizer() -> Any:
    """Returns a tokenizer of Gemma's kind: spaces as "▁", bytes for all other text, a beginning before each text."""
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = sorted({letter.replace(" ", "▁") for letter in WORDS + "modelusr\n"})
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        made = "▁"
        for letter in word:
            if made + letter not in tokens:
                merges.append((made, letter))
                tokens.append(made + letter)
            made += letter
    template = (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else "
        "message.role }}\n{{ message.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    make: Any = GemmaTokenizer
    tokenizer = make(vocab={token: index for index, token in enumerate(tokens)}, merges=merges, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": special[4:]})
    tokenizer.add_bos_token = True
    return tokenizer


def random_model(directory: Path, family: str, *, layers: int = 7) -> None:
    """Writes a model of the family ("llama", "qwen2", "qwen3" or "gemma3") with seeded random weights."""
    import torch
    import transformers

    tokenizer = gemma_tokenizer() if family == "gemma3" else byte_level_tokenizer()
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}
    causal = {"gemma3": "Gemma3ForCausalLM"}.get(family, f"{names[family]}ForCausalLM")
    own = {
        "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 16},
        "qwen3": {"head_dim": 128},
        "llama": {"head_dim": 64},
        "qwen2": {},
    }[family]
    config = getattr(transformers, f"{names[family]}Config")(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=family != "llama",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, causal)(config)
        for name, parameter in model.named_parameters():  # no vector is all zeros or ones, so that each one matters
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 0.0 if "bias" in name or family == "gemma3" else 1.0, 0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def greedy(weights: Any, ids: list[int]) -> list[int]:
    """Returns the prompt and the likeliest tokens after it, to the end of the reply."""
    import torch

    inputs = torch.tensor([ids])
    made = weights.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = made[0].tolist()
    return tokens


def margin(weights: Any, ids: list[int], ours: list[int], theirs: list[int]) -> float:
    """Returns by how many nats the model preferred its token where the two texts part: a tie is rounded either way."""
    import torch

    at = next(at for at in range(len(ids), len(ours)) if ours[: at + 1] != theirs[: at + 1])
    with torch.no_grad():
        logits = weights.model(torch.tensor([ours[:at]])).logits[0, -1]
    return float(logits[ours[at]] - logits[theirs[at]])


def row(base: Path, kind: str, scratch: Path) -> str:
    """Exports the model, reads it back and returns a line of the table."""
    import torch

    from art_cli.chat.requests import Sampling
    from art_cli.models import gguf_base, gguf_file
    from art_cli.models.weights import Weights, token_logprobs
    from art_cli.serving.merged_export import compare, load_source
    from art_cli.serving.served_model import Source

    def load(directory: Path) -> Weights:
        return load_source(Source(base.name, str(directory), None, 0, "float32", None, Sampling()), "float32")

    ours = load(base)
    file, read = scratch / f"{base.name}-{kind}.gguf", scratch / f"{base.name}-{kind}"
    gguf_file.write_model(file, ours.model, ours.tokenizer, kind=kind, name=base.name)
    read.mkdir()
    gguf_base.convert(file, read)
    theirs = load(read)
    torch.manual_seed(0)
    asked = ours.tokenizer.apply_chat_template([{"role": "user", "content": WORDS}], return_dict=False)
    inputs = torch.tensor([asked])
    prompts: list[list[int]] = ours.model.generate(
        inputs, max_new_tokens=TOKENS, do_sample=True, num_return_sequences=SAMPLES, pad_token_id=0
    ).tolist()
    wanted, found = ([token_logprobs(each, ids) for ids in prompts] for each in (ours, theirs))
    result = compare(base, wanted, found, math.inf)
    starts = [ids[: len(asked) // 2 + 4 * index] for index, ids in enumerate(prompts)]
    texts = [(greedy(ours, ids), greedy(theirs, ids)) for ids in starts]
    equal = f"{sum(one == other for one, other in texts)} of {len(texts)}"
    margins = [margin(ours, ids, *both) for ids, both in zip(starts, texts, strict=True) if both[0] != both[1]]
    if margins:
        equal += f", first apart by {min(margins):.0e} to {max(margins):.0e}"
    size = file.stat().st_size / 2**20
    return (
        f"| {base.name} | {kind} | {size:.1f} MiB | {result.max_gap:.1e} | {result.mean_gap:.1e} | "
        f"{result.max_share:.1e} | {equal} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=[*FAMILIES, REAL], default=[*FAMILIES, REAL])
    names = parser.parse_args().model
    print("| model | kind | file | largest difference, nats | mean | share of max(1, logprob) | greedy texts equal |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            base = smollm2() if name == REAL else Path(temporary) / name
            if base is None:
                continue
            if name != REAL:
                random_model(base, name)
            for kind in KINDS:
                print(row(base, kind, Path(temporary)), flush=True)


if __name__ == "__main__":
    main()
