"""Other projects' tools against `art serve`: what each of them counts, and what the server answered.

    python -m benchmarks.others                         # minutes on 2 cores, and the installing
    python -m benchmarks.others --only lm-eval guidellm
    python -m benchmarks.others --only lm-eval --model .scratch/smollm2-135m

lm-evaluation-harness answers 200 questions, capitals and sums, through the server and by its own transformers backend
in float32: it chooses by log-likelihood (`echo`, as text and as token ids, one a request and in lists), and writes a
word after three shots, by plain completions and in chat. RESULTS.md has the table.
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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.paths import ROOT
from tests.support.models.tool_clients import MODEL, build
from tests.support.servers.serving import art_serve

PACKAGES = {
    "lm-eval": ["lm_eval[api,hf]==0.4.13", "transformers==5.24.0", "torch==2.13.0"],
    "guidellm": ["guidellm==0.8.1"],
    "langchain": ["langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "pytest-asyncio"],
}
KEY = "the-key-of-the-benchmark"
DEADLINE_S = 1500.0
CAPITALS = (
    "France Paris, Italy Rome, Japan Tokyo, Spain Madrid, Germany Berlin, Egypt Cairo, Russia Moscow, China Beijing, "
    "Portugal Lisbon, Greece Athens, Austria Vienna, Poland Warsaw, Hungary Budapest, Ireland Dublin, Norway Oslo, "
    "Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Turkey Ankara, Cuba Havana, Peru Lima, Chile Santiago, "
    "Kenya Nairobi, Iraq Baghdad, Iran Tehran, Thailand Bangkok, Canada Ottawa, Australia Canberra, Belgium Brussels, "
    "Ukraine Kyiv, Colombia Bogota, Philippines Manila, Vietnam Hanoi, Syria Damascus, Lebanon Beirut, Ghana Accra, "
    "Senegal Dakar, Nepal Kathmandu, Jordan Amman, Morocco Rabat"
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


class Scored(NamedTuple):
    """What the harness found on a task. Example: Scored(42.5, [[["Paris"]], ...])"""

    points: float  # of 100
    answers: list[Any]  # what the model answered to each question, as the harness logs it


class Way(NamedTuple):
    """A way to ask the server for a task's answers."""

    task: str
    api: str  # the end of the URL, and of the harness's model type before "/"
    how: str
    batch: int = 1  # prompts a request

    def is_chat(self) -> bool:
        return self.api == "chat/completions"


WAYS = (
    Way("choose", "completions", "tokenized_requests=True"),
    Way("choose", "completions", "tokenized_requests=True", 8),
    Way("choose", "completions", "tokenized_requests=False", 8),
    Way("write", "completions", "tokenized_requests=False", 8),
    Way("write", "chat/completions", "tokenized_requests=False"),
)


def questions() -> list[Json]:
    """200 questions with four choices each: capitals both ways and sums; the right choice's index goes around."""
    pairs = [pair.split() for pair in CAPITALS.split(", ")]
    countries, cities = ([pair[side] for pair in pairs] for side in (0, 1))
    asked = []
    for index, (country, city) in enumerate(pairs):
        others = [(index + step) % len(pairs) for step in (3, 5, 11)]
        asked.append((f"The capital of {country} is", [city, *(cities[other] for other in others)]))
        asked.append((f"{city} is the capital of", [country, *(countries[other] for other in others)]))
    for one in range(2, 14):
        for other in range(1, 11):
            asked.append((f"{one} plus {other} is", [str(one + other + away) for away in (0, 1, -1, 10)]))
    docs = []
    for index, (question, choices) in enumerate(asked):
        answer = index % 4
        turned = choices[-answer:] + choices[:-answer] if answer else choices
        docs.append({"question": question, "choices": turned, "answer": answer, "right": choices[0]})
    return docs


def write_tasks(place: Path) -> None:
    """Two tasks on them: `choose` by the log-likelihood of the choices, `write` by the first word written."""
    docs = questions()
    shots = [docs[index] for index in (0, 1, len(docs) - 1)]
    for name, part in {"test": docs, "shots": shots}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in part))
    files = f"{{test: {place}/test.jsonl, shots: {place}/shots.jsonl}}"
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {files}}}\ntest_split: test\n"
    common += 'doc_to_text: "{{question}}"\n'
    (place / "choose.yaml").write_text(
        f'task: choose\noutput_type: multiple_choice\n{common}doc_to_choice: "{{{{choices}}}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    (place / "write.yaml").write_text(
        f'task: write\noutput_type: generate_until\n{common}doc_to_target: "{{{{right}}}}"\n'
        "fewshot_split: shots\nfewshot_config: {sampler: first_n}\nnum_fewshot: 3\n"
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}\n'
        "filter_list: [{name: word, filter: [{function: regex, regex_pattern: '(\\w+)'}, {function: take_first}]}]\n"
        "metric_list: [{metric: exact_match}]\n"
    )


async def harness(place: Path, out: Path, kind: str, arguments: str, task: str, batch: int, *, is_chat: bool) -> Scored:
    """Returns what the harness's model type scores on the task."""
    command: list[str | Path] = [
        "-m",
        "lm_eval",
        "--model",
        kind,
        "--model_args",
        arguments,
        "--tasks",
        task,
        "--include_path",
        place,
    ]
    command += ["--batch_size", str(batch), "--output_path", out, "--log_samples", "--device", "cpu"]
    command += ["--apply_chat_template", "--fewshot_as_multiturn", "true"] if is_chat else []
    await run(python_of("lm-eval"), *command, cwd=place)
    (file,) = out.rglob("samples_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    metric = "acc" if task == "choose" else "exact_match"
    return Scored(100 * statistics.mean(sample[metric] for sample in samples), [one["resps"] for one in samples])


async def lm_eval(url: str, model: Path, place: Path) -> list[str]:
    write_tasks(place)
    theirs: dict[tuple[str, bool], Scored] = {}
    for task, is_chat in dict.fromkeys((way.task, way.is_chat()) for way in WAYS):
        given = f"pretrained={model},dtype=float32"
        theirs[task, is_chat] = await harness(
            place, place / f"hf-{task}-{is_chat}", "hf", given, task, 8, is_chat=is_chat
        )
    lines = ["| task | way | art serve, points | hf, points | difference | answers |", "|---|---|---|---|---|---|"]
    for number, way in enumerate(WAYS):
        given = f"model={MODEL},base_url={url}/{way.api},tokenizer={model},{way.how},num_concurrent=2,max_length=1024"
        kind = f"local-{way.api.replace('/', '-')}"
        ours = await harness(place, place / f"out{number}", kind, given, way.task, way.batch, is_chat=way.is_chat())
        wanted = theirs[way.task, way.is_chat()]
        lines.append(
            f"| {way.task} | {way.api}, {way.how}, {way.batch} a request | {ours.points:.1f} | {wanted.points:.1f} | "
            f"{ours.points - wanted.points:+.1f} | {difference(way.task, ours.answers, wanted.answers)} |"
        )
    return lines


def difference(task: str, ours: list[Any], theirs: list[Any]) -> str:
    """Returns how far the answers themselves are from each other: log-likelihoods, or texts."""
    if task == "write":
        return f"{sum(one == other for one, other in zip(ours, theirs, strict=True))} of {len(theirs)} texts equal"
    scores = [[float(choice[0][0]) for answer in answers for choice in answer] for answers in (ours, theirs)]
    gap = max(abs(one - other) for one, other in zip(*scores, strict=True))
    return f"{len(scores[0])} log-likelihoods, at most {gap:.1e} nats apart"


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
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "test_standard.py"]
    variables = {"SERVER_URL": url.removesuffix("/v1"), "SERVER_MODEL": MODEL, "SERVER_KEY": KEY}
    try:
        out = await run(python_of("langchain"), *command, cwd=place, **variables)
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
            async with art_serve(f"{MODEL}={served}", "--engine", "embedded", key=KEY) as (_, url):
                lines = await TOOLS[tool](url, served, place)
                lines.append(f"answered: {await answered(url)}")
            print(f"\n{tool}  ({', '.join(PACKAGES[tool])})", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--model", type=Path, help="a directory with the model to serve")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.only, arguments.model and arguments.model.resolve()))
