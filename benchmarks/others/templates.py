"""How often a turn branches in the chat templates of Qwen, Llama, Mistral and gpt-oss, and why.

    python -m benchmarks.others.templates

No model: each family's own template and way to write a call, a scripted conversation
(tests/support/models/template_talks.py) of five turns, of which four may continue the tokens of the one before. The
model writes the arguments of its calls as Python's json.dumps does (tidy), or with other spaces and as loose JSON.
`sampled` and `written` are where the first branch begins: what the model said, and what its template makes of it in the
next prompt.
"""

import asyncio

from tests.support.models.template_talks import CALLS, FAMILIES, LOOSE, TIDY, Branch, talk


def row(name: str, tidy: list[Branch], loose: list[Branch]) -> str:
    most = len(CALLS) - 1
    first = (loose or tidy or [None])[0]
    shown = ("", "") if first is None else (repr(first.sampled), repr(first.written))
    turns = ", ".join(str(branch.turn + 1) for branch in loose) or "none"
    return f"{name:16s} {len(tidy)}/{most}   {len(loose)}/{most}   {turns:11s}  {shown[0]:32s} {shown[1]}"


def main() -> None:
    print(f"{'template':16s} tidy  loose  turns        {'sampled':32s} written")
    for name in FAMILIES:
        print(row(name, asyncio.run(talk(name, TIDY)), asyncio.run(talk(name, LOOSE))))


if __name__ == "__main__":
    main()
