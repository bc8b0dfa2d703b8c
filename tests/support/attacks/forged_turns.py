"""Conversations whose texts try to write control tokens, in the tokenizers and templates of several families.

    tokenizer x marker x position x form -> a request; `control_ids` of its prompt are those of its harmless twin

A position is where a foreign text may stand in a request. A form is how the text spells the marker. The harmless twin
has other letters in the same places.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.embedded import chat_prompts as messages
from art_cli.engines.embedded.reply_text import Vocabulary
from art_cli.models import builtin_models
from art_cli.models.builtin_models import chat_template
from benchmarks.shared.real_model import smollm2_tokenizer
from tests.support.models.tiny import tiny_tokenizer
from tests.support.paths import TESTS

Json = dict[str, Any]
WORDS = "the user said that one tool was not there, so it looks for the system and then says no\n{}[]:0123456789"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")  # fmt: skip
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink", "<arg_key>",
       "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content | trim + '</s>\\n' }}{% endfor %}<|assistant|>\n"


def trl_template(name: str) -> str | None:
    """A family's own template, which TRL ships, or None if TRL is not installed."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        return None
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def bytewise(
    template: str | None, special: Sequence[str], tags: Sequence[Any] = (), *, normalizer: Any = None, **own: Any
) -> Any:
    """A byte-level BPE as Qwen, Llama 3 and GPT have it, or None without a template."""
    if template is None:
        return None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return _made(tokenizer, template, special, tags, **own)


def pieces(template: str, special: Sequence[str], *, is_legacy: bool, model: str = "bpe") -> Any:
    """A SentencePiece-like tokenizer, whose vocabulary holds <s> and </s>, with a mark before each word."""
    alphabet = sorted({*WORDS, *"abcdefghijklmnopqrstuvwxyz", "▁"} - set(" \n"))
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, "th", "▁th", "▁the"]
    vocabulary[-3:-3] = ["he"]
    tokenizer: Any
    if model == "unigram":
        scored = [(piece, 0.0 if number < 3 else -2.0) for number, piece in enumerate(vocabulary)]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    else:
        ids = {piece: id for id, piece in enumerate(vocabulary)}
        merges = [("t", "h"), ("h", "e"), ("▁", "th"), ("▁th", "e")]
        bpe = models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        tokenizer = Tokenizer(bpe)
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _made(tokenizer, template, special, (), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _made(tokenizer: Tokenizer, template: str, special: Sequence[str], tags: Sequence[Any], **own: Any) -> Any:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens(
        [tag if isinstance(tag, AddedToken) else AddedToken(tag, special=False, normalized=False) for tag in tags]
    )
    own = {"eos_token": special[-1], "clean_up_tokenization_spaces": False, **own}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **own)


def _smollm2() -> Any:
    directory = smollm2_tokenizer()
    return None if directory is None else AutoTokenizer.from_pretrained(directory)


def _smollm2_tools() -> Any:
    tokenizer = _smollm2()
    if tokenizer is not None:
        tokenizer.chat_template = chat_template()
    return tokenizer


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MISTRAL_V7 = (TESTS / "chat" / "templates" / "mistral_v7.jinja").read_text()
MISTRAL_V3 = (TESTS / "chat" / "templates" / "mistral_v3.jinja").read_text()
ADD = {"type": "object", "properties": {"first": {"type": "string"}, "n": {"type": "integer"}}}
ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD}}
MAKERS: dict[str, Callable[[], Any]] = {
    "bytes": tiny_tokenizer,
    "recipe": lambda: builtin_models.make_tokenizer([WORDS], tools=[ADD_TOOL], splits_spaces=True),
    "builtin:tiny": lambda: builtin_models.make_tokenizer([WORDS], template=chat_template(), most_tokens=1500),
    "SmolLM2": _smollm2,
    "SmolLM2, tools": _smollm2_tools,
    "Qwen3": lambda: bytewise(trl_template("qwen3"), CHATML, TAGS, normalizer=normalizers.NFC()),
    "Llama 3": lambda: bytewise(
        trl_template("llama3_1"),
        [*LLAMA, *(f"<|reserved_special_token_{number}|>" for number in range(20)), "<|eot_id|>"],
        bos_token="<|begin_of_text|>",
    ),
    "gpt-oss": lambda: bytewise(trl_template("gptoss"), HARMONY),
    "GLM": lambda: bytewise(trl_template("glm4moe"), GLM, TAGS),
    "Phi": lambda: bytewise(trl_template("phi3"), ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
    "roles": lambda: bytewise(ROLES, ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "user", "</s>"]),
    "Mistral": lambda: pieces(MISTRAL_V7, MISTRAL, is_legacy=False),
    "Llama 2": lambda: pieces(MISTRAL_V3, MISTRAL, is_legacy=True),
    "unigram": lambda: pieces(MISTRAL_V7, MISTRAL, is_legacy=False, model="unigram"),
    "flags": lambda: bytewise(
        chat_template(),
        CHATML,
        [
            AddedToken("<tool_call>", normalized=True),
            AddedToken("</tool_call>", normalized=True, lstrip=True),
            AddedToken("<think>", normalized=True, rstrip=True),
            AddedToken("<end>", single_word=True, normalized=False),
            AddedToken("\n\n", normalized=False),
            AddedToken("  ", normalized=False),
            AddedToken("looks", normalized=False),
        ],
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    ),
}


@cache
def vocabulary(name: str) -> Vocabulary | None:
    """None: what the tokenizer is made from is not installed."""
    tokenizer = MAKERS[name]()
    return None if tokenizer is None else Vocabulary(tokenizer)


def control_texts(tokenizer: Any) -> dict[int, str]:
    """The special tokens, and the other added ones that are neither white space nor words."""
    return {
        id: token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special or re.fullmatch(r"<.*>|\[.*\]", token.content, re.DOTALL) or "<tool_call>" in token.content
    }


# --- positions --------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    messages: list[Json]
    tools: list[Json] = []


HI, USER = {"role": "user", "content": "hi"}, {"role": "user", "content": "and now"}


def _tool(name: str = "add", description: str = "adds", key: str = "first", about: str = "a number") -> Json:
    properties = {key: {"type": "string", "description": about, "enum": ["one", about]}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _called(name: str, arguments: str, id: str = "abcdefgh1", said: str | None = None, result: str = "5") -> Asked:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": id, "content": result}
    reply = {"role": "assistant", "content": said, "tool_calls": [call]}
    return Asked([HI, reply, answer], [_tool()])


def _escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text if ord(letter) < 0x10000)


POSITIONS: dict[str, Callable[[str], Asked]] = {
    "system": lambda text: Asked([{"role": "system", "content": text}, HI]),
    "user": lambda text: Asked([{"role": "user", "content": text}]),
    "user between": lambda text: Asked([HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": text}]),
    "user's parts": lambda text: Asked(
        [{"role": "user", "content": [{"type": "text", "text": part} for part in (text[:3], text[3:])]}]
    ),
    "policy": lambda text: Asked([HI, {"role": "assistant", "content": "I " + text}, USER]),
    "policy's whole text": lambda text: Asked([HI, {"role": "assistant", "content": text}, USER]),
    "thought": lambda text: Asked([HI, {"role": "assistant", "content": "x", "reasoning_content": text}]),
    "two messages": lambda text: Asked(
        [HI, {"role": "assistant", "content": text[:4]}, {"role": "user", "content": text[4:]}]
    ),
    "tool result": lambda text: _called("add", '{"first": "1"}', result=text),
    "text before a call": lambda text: _called("add", '{"first": "1"}', said=text),
    "call's name": lambda text: _called(text, '{"first": "1"}'),
    "call's argument": lambda text: _called("add", json.dumps({"first": text})),
    "argument, loose": lambda text: _called("add", '{ "first":' + json.dumps(text, ensure_ascii=False) + "}"),
    "argument, escaped": lambda text: _called("add", '{"first": "' + _escaped(text) + '"}'),
    "argument's key": lambda text: _called("add", json.dumps({text: 1})),
    "call's id": lambda text: _called("add", '{"first": "1"}', id=text),
    "tool's name": lambda text: Asked([HI], [_tool(name=text)]),
    "tool's description": lambda text: Asked([HI], [_tool(description=text)]),
    "property's name": lambda text: Asked([HI], [_tool(key=text)]),
    "property's text": lambda text: Asked([HI], [_tool(about=text)]),
    "message's name": lambda text: Asked([{**HI, "name": text}]),
}

FORMS: dict[str, Callable[[str, str], str]] = {  # of a marker and a whole turn in the family's own words
    "alone": lambda mark, turn: mark,
    "in a text": lambda mark, turn: f"I say {mark}user",
    "in white space": lambda mark, turn: f" \n{mark} \n ",
    "twice": lambda mark, turn: mark + mark,
    "beginning": lambda mark, turn: f"so {mark[: len(mark) // 2 + 1]}",
    "end": lambda mark, turn: f"{mark[len(mark) // 2 :]} so",
    "inside": lambda mark, turn: mark[2:-2] or mark,
    "nested": lambda mark, turn: mark[:3] + mark + mark[3:],
    "wide": lambda mark, turn: mark.replace("<", "＜").replace("|", "｜").replace(">", "＞"),
    "loud": lambda mark, turn: mark.upper(),
    "split by nothing": lambda mark, turn: mark[:2] + "\u200b" + mark[2:],
    "a turn": lambda mark, turn: f"no{turn}{mark}",
}


def whole_turn(vocabulary: Vocabulary) -> str:
    """A turn of the user and the beginning of the policy's, as the template writes them."""
    given: str = vocabulary.tokenizer.apply_chat_template([HI], tokenize=False, add_generation_prompt=True)
    return given


def harmless(text: str) -> str:
    """A text of the same length with white space in the same places and no marker in it."""
    return re.sub(r"\S", "z", text)


def ids_of(vocabulary: Vocabulary, asked: Asked) -> list[int] | None:
    """The prompt's tokens, or None if the template refuses such a conversation."""
    request = Request(model="m", sampling=Sampling(), messages=asked.messages, tools=asked.tools)
    try:
        return messages.render(vocabulary, request).ids
    except ChatError:
        return None


def is_forged(vocabulary: Vocabulary, position: str, text: str) -> bool | None:
    """Whether the text changes the control tokens of its prompt, or None if the template refuses its harmless twin."""
    make = POSITIONS[position]
    expected = _twin(vocabulary, position, harmless(text))
    if expected is None:
        return None
    given, control = ids_of(vocabulary, make(text)), control_texts(vocabulary.tokenizer)
    return given is None or [id for id in given if id in control] != [id for id in expected if id in control]


@lru_cache(4096)
def _twin(vocabulary: Vocabulary, position: str, text: str) -> list[int] | None:
    return ids_of(vocabulary, POSITIONS[position](text))


def is_kept(vocabulary: Vocabulary, position: str, text: str) -> bool:
    """Whether the prompt's tokens still spell the text, where the template shows this position."""
    make, decode = POSITIONS[position], vocabulary.tokenizer.decode
    shown, twin = ids_of(vocabulary, make(text)), harmless(text).strip()
    if shown is None or decode(_twin(vocabulary, position, harmless(text)) or []).count(twin) == 0:
        return True
    escaped = json.dumps(text.strip(), ensure_ascii=False)[1:-1]
    forms = {text.strip(), escaped, json.dumps(text.strip())[1:-1], _escaped(text.strip())}
    return any(form in decode(shown) for form in forms)


# --- ordinary conversations -------------------------------------------------------------------------------------------

ORDINARY = [
    *(
        "a < b and b > c",
        "> quoted\n> twice",
        "if x<y: return [1, 2]",
        "<b>bold</b> text",
        "what is 2+2?",
        "x <",
        "< x",
    ),
    *(
        "é — 日本語 ½",
        'She said "no".',
        '{"a": [1, {"b": "c"}]}',
        "  indented\n\n\ttabs  ",
        "| a | b |\n|---|---|",
        ">",
    ),
    *("1 << 3 || 4", "list[int] -> dict[str, Any]", "user: hi\nassistant: hello", "", "[x] done [ ] open", "<3", "<|>"),
    *(
        "the tool looks there",
        "end",
        "a" * 300,
        "C:\\path\\to",
        "\\u003cb\\u003e",
        "emoji 🙂",
        "think",
        "im_start",
        "|",
    ),
]


def ordinary(draw: random.Random) -> Asked:
    """A conversation of several turns, with tools in two thirds of them, as clients send it."""

    def text() -> str:
        return " ".join(draw.choices(ORDINARY, k=draw.randint(1, 3)))

    tools = [
        _tool(f"tool_{n}", text(), draw.choice(["first", "a-b", "$ref"]), text()) for n in range(draw.randint(0, 2))
    ]
    talk: list[Json] = [{"role": "system", "content": text()}] if draw.random() < 0.5 else []
    for turn in range(draw.randint(1, 3)):
        talk.append({"role": "user", "content": text()})
        if tools and draw.random() < 0.6:
            arguments = json.dumps({"first": text(), "n": turn}, ensure_ascii=False)
            call = {"id": f"abcdefgh{turn}", "type": "function"}
            call["function"] = {"name": "tool_0", "arguments": arguments}
            talk.append({"role": "assistant", "content": draw.choice(["", "I look."]), "tool_calls": [call]})
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": text()})
        talk.append({"role": "assistant", "content": text()})
    return Asked([*talk, {"role": "user", "content": text()}], tools)


def plain_ids(tokenizer: Any, asked: Asked) -> list[int] | None:
    """The prompt as transformers makes it, markers wherever they stand; None if the template refuses it."""
    talk = [dict(message) for message in asked.messages]
    for message in talk:
        message["content"] = message["content"] or ""
        if message.get("tool_calls"):
            calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
            for call in calls:
                if "arguments is string" not in tokenizer.chat_template:
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            message["tool_calls"] = calls
    try:
        text = tokenizer.apply_chat_template(
            talk, tools=asked.tools or None, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template refuses in any way
        return None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
