"""Models that are made by code and need no hub: `model.base: builtin:tiny`

    tiny    a Qwen3 of a million parameters with seeded random weights, for trying an agent, a judge or a machine

It speaks ChatML with tools in the Hermes format and thinks nothing yet: what it samples is noise until `art sft` or
training has taught it. Each function writes a transformers directory, the same bytes each time.
"""

from pathlib import Path
from typing import Any

BUILTIN_MODELS = ("tiny",)

# The commonest words of English text, for the tokenizer's merges: a word is one token, anything else its bytes.
WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
should America world high every near add food between own below country plant last school father keep tree never start
city earth eye light thought head under story saw left don't few while along might close something seem next hard open
example begin life always those both paper together got group often run system user assistant tool tools question score
email message search result date file list yes no true false null name arguments content subject sender board cell row
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]

# ChatML with tools as Qwen 2.5 and Hermes write them: definitions in the system message, calls as tagged JSON.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nA call is one JSON object inside <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def tiny(directory: Path) -> None:
    """Writes the model `builtin:tiny` into the directory: weights, configuration and tokenizer."""
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(_tiny_config(tokenizer))
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # the head is tied to it: logits of some size
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


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
    tokenizer.train_from_iterator([f"{word} {word}" for word in WORDS.split() for _ in range(2)], trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
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
