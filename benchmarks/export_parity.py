"""How near an export is to its checkpoint: logprobs of merged weights against base and adapter, in float32.

    python benchmarks/export_parity.py                  # with .venv-vllm (make test-vllm); about 2 minutes on 2 cores
    python benchmarks/export_parity.py --without-vllm

Trains a tiny policy (tests/support/tool_clients.py), exports it with `art export` and scores 8 sequences of 64 to 512
random tokens, and the conversation it was taught, with base plus adapter by transformers and PEFT, and with the export:
as the export's own replay does it, by plain transformers, and served by `art serve EXPORT --engine vllm`. Prints the
largest difference of a token's logprob, in nats; the bound is 1e-4.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from art_cli.chat.requests import Sampling  # noqa: E402
from art_cli.cli import app as cli  # noqa: E402
from art_cli.config.schema import VllmEngineConfig  # noqa: E402
from art_cli.serving.served_model import Source, find_source  # noqa: E402
from art_cli.serving.served_policies import Loader  # noqa: E402
from tests.support.real_vllm import PYTHON, QUICK  # noqa: E402
from tests.support.tool_clients import TOOLS, demo, teach  # noqa: E402

BOUND = 1e-4
LENGTHS = (64, 64, 128, 128, 256, 256, 512, 512)

Score = Callable[[list[int]], list[float]]


def by_transformers(model: Any) -> Score:
    def score(ids: list[int]) -> list[float]:
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        found: list[float] = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found

    return score


async def by_vllm(source: Source, sequences: list[list[int]], logs: Path) -> list[list[float]]:
    """Served the way `art serve` serves it."""
    config = VllmEngineConfig.model_validate({"name": "vllm", "python": PYTHON, **QUICK})
    engine = await Loader(config, logs=logs).make(source)
    try:
        return [await engine.score(ids) for ids in sequences]
    finally:
        await engine.close()


def gap(ours: list[list[float]], theirs: list[list[float]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True))


def sequences(vocabulary: int, conversation: list[int]) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS] + [conversation]


def measure(place: Path, with_vllm: bool) -> dict[str, float]:
    run, merged = teach(place, [demo(TOOLS)]), place / "merged"
    with (place / "export.json").open("w") as out, redirect_stdout(out):
        assert cli.run(["export", str(run.checkpoint_path(0)), "-o", str(merged), "--json"]) == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(place / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    tokens = tokenizer.apply_chat_template(demo(TOOLS)["messages"], tools=TOOLS, return_dict=True)["input_ids"]
    scored = sequences(base.config.vocab_size, tokens)
    without = [by_transformers(base)(ids) for ids in scored]
    policy = peft.PeftModel.from_pretrained(base, run.checkpoint_path(0)).eval()
    wanted = [by_transformers(policy)(ids) for ids in scored]
    gaps = {
        "the base without its adapter": gap(wanted, without),
        "the export's own replay": json.loads((place / "export.json").read_text())["max_gap"],
        "merged, by transformers": gap(wanted, [by_transformers(load(merged))(ids) for ids in scored]),
    }
    if with_vllm:
        adapter = find_source(str(run.checkpoint_path(0)))
        alone = Source("merged", str(merged), None, 0, "float32", None, Sampling())
        gaps["merged, served by vLLM"] = gap(wanted, asyncio.run(by_vllm(alone, scored, place / "logs")))
        gaps["adapter, served by vLLM"] = gap(wanted, asyncio.run(by_vllm(adapter, scored, place / "logs")))
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-vllm", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-export-") as place:
        gaps = measure(Path(place), not arguments.without_vllm)
    print(f"{'against base and adapter by transformers and PEFT':52s} largest logprob difference, nats")
    for name, found in gaps.items():
        print(f"{name:52s} {found:.1e}")
    difference, *others = gaps.values()
    return 0 if max(others) < BOUND < difference else 1


if __name__ == "__main__":
    sys.exit(main())
