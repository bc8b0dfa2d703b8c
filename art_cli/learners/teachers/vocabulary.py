"""Refuses a teacher that reads other tokens than the policy writes: equal ids must mean equal texts."""

from typing import Any

from art_cli.runtime.errors import UsageError, printable

CURE = "a teacher must have the policy's tokenizer"
# A text that two tokenizers of different models cut differently: words, numbers, code, spaces, other scripts.
PROBE = "The unbelievable 1234567 def f(x):\n\treturn   x**2  # naïve Straße 你好 мир 🙂 https://a.b/c?d=e\r\n\n\n"


def check_vocabulary(teacher: Any, own: Any, name: str) -> None:
    """Raises UsageError if the tokenizers give some token different ids, or one has a token that the other lacks."""
    theirs, ours = teacher.get_vocab(), own.get_vocab()
    if theirs == ours:
        return
    [(token_id, token), *_] = sorted((id, token) for token, id in ours.items() - theirs.items()) or [(-1, "")]
    if not token:
        [(token_id, token), *_] = sorted((id, token) for token, id in theirs.items() - ours.items())
    names = {id: each for each, id in theirs.items()}, {id: each for each, id in ours.items()}
    shown = " and ".join(_show(each.get(token_id)) for each in names)
    raise UsageError(
        f"{name}: its vocabulary is not the policy's ({len(theirs):,} and {len(ours):,} tokens; token {token_id} is "
        f"{shown}); {CURE}"
    )


def probe_text(own: Any) -> str:
    """Returns a text that shows whether a server's tokenizer is this one, special tokens included."""
    return PROBE + "".join(map(str, own.all_special_tokens))


def check_probe(token_ids: list[int], own: Any, name: str) -> None:
    """Raises UsageError if a server gave `probe_text` other token ids than the policy's tokenizer."""
    ours = own.encode(probe_text(own), add_special_tokens=False)
    if token_ids == ours:
        return
    place = next((i for i, pair in enumerate(zip(token_ids, ours, strict=False)) if pair[0] != pair[1]), None)
    where = "" if place is None else f"; token {place} of a probe text is {token_ids[place]} and {ours[place]}"
    raise UsageError(
        f"{name}: its tokenizer is not the policy's ({len(token_ids)} and {len(ours)} tokens of a probe text{where}); "
        f"{CURE}"
    )


def _show(token: str | None) -> str:
    return "none" if token is None else repr(printable(token, limit=40))
