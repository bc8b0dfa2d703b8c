"""Other projects' tools against `art serve`: what each of them counts, and what the server answered.

    python -m benchmarks.others                         # about 10 minutes on 2 cores, and the installing
    python -m benchmarks.others --only lm-eval guidellm
    python -m benchmarks.others --only lm-eval --model .scratch/smollm2-135m

lm-evaluation-harness scores a multiple-choice task by log-likelihood (`local-completions`, as text and as token ids,
one request at a time and in lists) and generates on both protocols; the scores are compared with transformers'.
guidellm sends what it sends by default. LangChain's standard tests run with three clients. Each tool has an
environment of its own under .scratch, made at the first run. The served model is a tiny random one, so that tests of
LangChain which depend on what a model writes fail; with `--model DIR` it is another. Tasks are local, and nothing but
packages is downloaded.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.tool_clients import MODEL, art_serve, build  # noqa: E402

PACKAGES = {
    "lm-eval": ["lm_eval[api]==0.4.13", "transformers==5.24.0"],
    "guidellm": ["guidellm==0.8.1"],
    "langchain": ["langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "pytest-asyncio"],
}
KEY = "the-key-of-the-benchmark"
DEADLINE_S = 1500.0
CAPITALS = (
    "France Paris, Italy Rome, Japan Tokyo, Spain Madrid, Germany Berlin, Egypt Cairo, Russia Moscow, China Beijing"
)
NUM_GUIDED = 6

Json = dict[str, Any]


def python_of(tool: str) -> Path:
    """The Python of a tool's own environment, which is made if it is missing."""
    place = ROOT / ".scratch" / f"others-{tool}"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[tool]], check=True)
        (place / "ready").touch()
    return python


async def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The program's output. Raises RuntimeError with its end where it fails."""
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    if process.returncode:
        raise RuntimeError(out.decode()[-3000:])
    return out.decode()


# --- lm-evaluation-harness --------------------------------------------------------------------------------------------


def write_tasks(place: Path) -> list[Json]:
    """Two local tasks on the capitals of eight countries: which of three cities, and which city."""
    pairs = [tuple(pair.split()) for pair in CAPITALS.split(", ")]
    cities = [city for _, city in pairs]
    docs = []
    for index, (country, city) in enumerate(pairs):
        choices = [city, cities[(index + 3) % len(cities)], cities[(index + 5) % len(cities)]]
        docs.append({"question": f"The capital of {country} is", "choices": choices, "answer": 0, "city": city})
    (place / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {place}/docs.jsonl}}}}\ntest_split: test\n"
    common += 'doc_to_text: "{{question}}"\n'
    (place / "choose.yaml").write_text(
        f'task: choose\noutput_type: multiple_choice\n{common}doc_to_choice: "{{{{choices}}}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    (place / "write.yaml").write_text(
        f'task: write\noutput_type: generate_until\n{common}doc_to_target: "{{{{city}}}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n'
    )
    return docs


def own_scores(model: Path, docs: list[Json]) -> list[list[float]]:
    """The log-likelihood of each document's choices by one plain forward of transformers each."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def score(question: str, choice: str) -> float:
        context, whole = (tokenizer(text)["input_ids"] for text in (question, f"{question} {choice}"))
        with torch.no_grad():
            rows = network(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        return float(rows.gather(1, torch.tensor(whole)[1:, None])[len(context) - 1 :].sum())

    return [[score(doc["question"], choice) for choice in doc["choices"]] for doc in docs]


async def lm_eval(url: str, model: Path, place: Path) -> list[str]:
    docs, python = write_tasks(place), python_of("lm-eval")
    expected = own_scores(model, docs)
    lines = []
    ways = {
        "choose, token ids, one a request": ("local-completions", "choose", "tokenized_requests=True", "1"),
        "choose, token ids, lists of 8": ("local-completions", "choose", "tokenized_requests=True", "8"),
        "choose, text, lists of 8": ("local-completions", "choose", "tokenized_requests=False", "8"),
        "write, plain completions": ("local-completions", "write", "tokenized_requests=False", "4"),
        "write, chat": ("local-chat-completions", "write", "tokenized_requests=False", "1"),
    }
    for number, (name, (kind, task, how, size)) in enumerate(ways.items()):
        is_chat = "chat" in kind
        path = "chat/completions" if is_chat else "completions"
        given = f"model={MODEL},base_url={url}/{path},tokenizer={model},{how},num_concurrent=2,max_length=1024"
        out = place / f"out{number}"
        more = ["--apply_chat_template"] if is_chat else []
        command = ["-m", "lm_eval", "--model", kind, "--model_args", given, "--tasks", task, "--include_path", place]
        command += ["--batch_size", size, "--output_path", out, "--log_samples", *more]
        await run(python, *command, cwd=place)
        (file,) = out.rglob("samples_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        if task == "write":
            lines.append(f"{name}: {len(samples)} of {len(docs)} answered, such as {samples[0]['resps'][0][0]!r}")
            continue
        found = [[float(score) for ((score, _),) in sample["resps"]] for sample in samples]
        gap = max(
            abs(a - b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
        )
        num_right = sum(row.index(max(row)) == 0 for row in found)
        lines.append(
            f"{name}: {len(found)} of {len(docs)} scored, {num_right} right; "
            f"at most {gap:.1e} nats from transformers on {sum(map(len, found))} choices"
        )
    return lines


# --- guidellm, LangChain ----------------------------------------------------------------------------------------------


async def guidellm(url: str, model: Path, place: Path) -> list[str]:
    lines = []
    for number, path in enumerate(("/v1/chat/completions", "/v1/completions")):
        report = place / f"guidellm{number}.json"
        target = f"kind=openai_http,target={url.removesuffix('/v1')},api_key={KEY},request_format={path}"
        options = [
            *("--backend", target, "--tokenizer", f"kind=huggingface_auto,model={model}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_GUIDED}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ]
        await run(python_of("guidellm"), "-m", "guidellm", "run", *options, cwd=place)
        (found,) = json.loads(report.read_text())["benchmarks"]
        totals = found["metrics"]["request_totals"]
        lengths = [request["output_metrics"]["text_tokens"] for request in found["requests"]["successful"]]
        lines.append(
            f"{path}: {totals['successful']} of {NUM_GUIDED} requests, {totals['errored']} errors; tokens {lengths}"
        )
    return lines


async def langchain(url: str, model: Path, place: Path) -> list[str]:
    (place / "test_standard.py").write_text(Path(__file__).with_name("langchain_standard.py").read_text())
    modes = "".join(f"asyncio_default_{kind}_loop_scope = session\n" for kind in ("fixture", "test"))
    (place / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\n{modes}")
    command = [python_of("langchain"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "test_standard.py"]
    variables = {"SERVER_URL": url.removesuffix("/v1"), "SERVER_MODEL": MODEL, "SERVER_KEY": KEY}
    try:
        out = await run(*command, cwd=place, **variables)
    except RuntimeError as error:  # pytest's status where a test fails
        out = str(error)
    return [out.strip().splitlines()[-1]]


TOOLS: dict[str, Callable[[str, Path, Path], Any]] = {"lm-eval": lm_eval, "guidellm": guidellm, "langchain": langchain}


async def answered(url: str) -> str:
    """The number of requests by path and status, of those that are completions."""
    import httpx

    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        text = (await http.get(f"{url.removesuffix('/v1')}/metrics")).text
    found = re.findall(r'art_requests_total\{code="(\d+)",route="(/v1/[a-z/]+)"\} (\d+)', text)
    return ", ".join(f"{route} {code}: {number}" for code, route, number in found)


async def main(tools: list[str], model: Path | None) -> None:
    for tool in tools:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            served = model
            if served is None:
                served = place / "tiny"
                build(served, 2048)
            async with art_serve(served, KEY, "--engine", "embedded") as (_, url):
                lines = await TOOLS[tool](url, served, place)
                lines.append(f"answered: {await answered(url)}")
            print(f"\n{tool}  ({', '.join(PACKAGES[tool])})", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--model", type=Path, help="a directory with the model to serve")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.only, arguments.model and arguments.model.resolve()))
