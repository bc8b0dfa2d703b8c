"""Makes small base models from nothing: a Qwen3 with seeded random weights, and a tokenizer that knows a task's words.

    build(directory, make_tokenizer([SYSTEM]))                  # a model whose words are those of the system prompt
    build(directory, make_tokenizer(WORDS, tools=TOOLS))        # one that calls tools

Such a model learns one task on a CPU. It speaks ChatML; calls of tools are in the Hermes format (docs/tool-calls.md).
Its files are the same bytes each time.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]

# ChatML, as Qwen writes it. What ends a reply is sampled; the line break after it comes with the next prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# The same with tools. Of the definitions it shows the names alone; what a tool does, the model learns by using it.
TOOLS_TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>tools\\n' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- if call.function %}{% set call = call.function %}{% endif -%}
{{- '\\n' if message.content or not loop.first -}}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def build(
    directory: Path,
    tokenizer: Any,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    positions: int = 512,
    rope_theta: float = 10_000.0,
) -> None:
    """Writes a Qwen3 of seed 0 and the tokenizer: a million parameters with these sizes and 1,000 tokens.

    `positions`: the longest context in tokens. `rope_theta`: a small one keeps near tokens apart better, which suits
    short contexts.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_config: Any = Qwen3Config  # its signature lacks rope_theta, which it takes
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        rope_theta=rope_theta,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # tied to the head, and wide enough for that
    save(directory, model, tokenizer)


def save(directory: Path, model: Any, tokenizer: Any) -> None:
    """Writes a model and its tokenizer."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer(
    texts: Iterable[str],
    *,
    tools: Sequence[dict[str, Any]] = (),
    template: str | None = None,
    splits_spaces: bool = False,
    most_tokens: int = 100_000,
) -> Any:
    """Returns a transformers tokenizer in which each word of the texts is one token, and all other text is bytes.

    A word has the space before it, if there is one; the same word at a line's start or behind a quote is another
    token, and is in the texts if it is to be one token there. With `splits_spaces` a space is a token of its own, so
    that a word is the same token in a sentence and in the JSON of a call: easier to copy. Digits are tokens each.
    `tools` as a request has them: all of a call but the text of its arguments is one token a piece (call_pieces).
    `template`: the chat template, by default ChatML, that with tools if there are any. `most_tokens` cuts off rare
    words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(text, "isolated") for text in ("\n", " ")[: 1 + splits_spaces]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=most_tokens,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if template is None:
        template = TOOLS_TEMPLATE if tools else CHAT_TEMPLATE
        texts = [*texts, "system", "user", "assistant", *(["tools", "tool"] if tools else [])]
        texts += [tool["function"]["name"] for tool in tools]
    tokenizer.train_from_iterator(texts, trainer)
    pieces = [*(MARKERS if "<tool_call>" in template else []), *call_pieces(tools)]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def call_pieces(tools: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the pieces of text that a call of these tools is made of, apart from its arguments' values.

    Example: a tool search(query: string) has '<tool_call>\\n{"name": "search", "arguments": {"query": "' and
    '"}}\\n</tool_call>', so that a search for one word takes three tokens. Arguments stand in their schema's order.
    """
    pieces: dict[str, None] = {}
    for tool in tools:
        piece = f'<tool_call>\n{{"name": "{tool["function"]["name"]}", "arguments": {{'
        arguments = (tool["function"].get("parameters") or {}).get("properties") or {}
        for index, (name, schema) in enumerate(arguments.items()):
            quote = '"' if schema.get("type") == "string" else ""
            pieces[f'{piece}{", " if index else ""}"{name}": {quote}'] = None
            piece = quote
        pieces[f"{piece}}}}}\n</tool_call>"] = None
    return list(pieces)
