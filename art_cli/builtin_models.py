"""Models that are made by code and need no hub: `model.base: builtin:tiny`

    tiny    a Qwen3 of a million parameters with seeded random weights, for trying an agent, a judge or a machine

It uses ChatML with tools in the Hermes format. What it samples is noise until `art sft` or training has taught it.
Each function writes a transformers directory, the same bytes each time.
"""

from pathlib import Path

from art_cli import small_models

BUILTIN_MODELS = ("tiny",)


def entry_of(base: str) -> str:
    """The base; for "builtin:tiny" the entry of the function that builds it. Raises ValueError: no such model."""
    family, _, name = base.partition(":")
    if family != "builtin":
        return base
    if name not in BUILTIN_MODELS:
        raise ValueError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN_MODELS)}")
    return f"art_cli.builtin_models:{name}"


def tiny(directory: Path) -> None:
    """Writes the model `builtin:tiny` into the directory: weights, configuration and tokenizer."""
    texts = [f"{word} {word}" for word in words() for _ in range(2)]
    tokenizer = small_models.make_tokenizer(texts, template=chat_template(), most_tokens=1500)
    small_models.build(directory, tokenizer, positions=4096)


def words() -> list[str]:
    """The commonest words of English text. The tokenizer makes each of them one token, and any other text bytes."""
    return _read("builtin_words.txt").split()


def chat_template() -> str:
    """ChatML with tools as Qwen 2.5 and Hermes write them: definitions in the system message, calls as tagged JSON."""
    return _read("builtin_chat_template.jinja").removesuffix("\n")


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
