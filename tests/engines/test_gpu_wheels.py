"""Everything we send to vLLM and call in Unsloth exists in their GPU wheels, which may differ from the CPU wheels.

The names of the wheels are in gpu_wheels/*.json, as tests/support/others/gpu_wheels.py reads them. What we send is not
listed here: the argument builder and the engine run, against a server that writes down each call.
"""

import ast
import itertools
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml
from msgspec import structs

from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import VllmEngineConfig
from art_cli.engines.vllm import arguments, control
from art_cli.engines.vllm.arguments import MODULE, PROGRAM
from art_cli.learners import unsloth
from tests.engines.test_vllm import MODEL, Fake
from tests.support.paths import ROOT
from tests.support.standins.fake_vllm import Fake as Server

Json = dict[str, Any]

DIRECTORY = Path(__file__).parent / "gpu_wheels"
VLLM = sorted(path.stem for path in DIRECTORY.glob("vllm-*.json"))
UNSLOTH = sorted(path.stem for path in DIRECTORY.glob("unsloth-*.json"))
PLUGIN = "vllm_bnb_plugin-0.0.3"


def wheel(name: str) -> Json:
    found: Json = json.loads((DIRECTORY / f"{name}.json").read_text())
    return found


def test_the_versions_that_are_held_are_those_that_are_installed() -> None:
    pins = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("constraints*.txt")])
    for name in (f"vllm=={VLLM[0].partition('-')[2]}", f"unsloth=={UNSLOTH[0].partition('-')[2]}"):
        assert name in pins


# --- how the server is started ----------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """The command lines of all kinds of models, machines and settings, with the arguments that our files name."""
    found = []
    named: Json = {}
    for path in [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("examples/*.yaml")]:
        engine = (yaml.safe_load(path.read_text()) or {}).get("engine")
        named |= (engine.get("args") or {}) if isinstance(engine, dict) else {}
    for has_gpu, sleep, quantize, dtype in itertools.product(
        (False, True), (0, 1, 2), (None, "4bit"), ("float32", "bfloat16")
    ):
        if dtype == "float32" and (quantize is not None or has_gpu):
            continue  # refused: there vLLM computes in 16 bits only
        model = structs.replace(MODEL, quantize=quantize, dtype=dtype)
        config = VllmEngineConfig.model_validate({"name": "vllm", "replicas": 2, "args": named})
        paths = {"python": Path("p"), "template": Path("t")}
        found.append(
            arguments.command(config, model, port=1, name="n", sleep=sleep, has_gpu=has_gpu, **paths)  # type: ignore[arg-type]
        )
    return found


def pairs(argv: list[str]) -> list[tuple[str, str | None]]:
    """["--a", "1", "--b"] -> [("a", "1"), ("b", None)]"""
    following = [*argv[1:], "--"]
    return [
        (each[2:], None if after.startswith("--") else after)
        for each, after in zip(argv, following, strict=True)
        if each.startswith("--")
    ]


@pytest.mark.parametrize("name", VLLM)
def test_every_flag_is_one_of_vllm_s(name: str) -> None:
    """Flags with values are not boolean; `--no-x` exists for boolean flags."""
    known = wheel(name)["flags"]
    for argv in commands():
        for flag, value in pairs(argv):
            is_off = value is None and flag.startswith("no-") and known.get(flag[3:])
            assert is_off or flag in known, f"--{flag} is no flag of {name}"
            assert value is not None or is_off or known[flag], f"--{flag} needs a value"


CHOICES = {"logprobs-mode": "LogprobsMode", "max-lora-rank": "MaxLoRARanks", "dtype": "ModelDType"}


@pytest.mark.parametrize("name", VLLM)
def test_every_value_of_a_choice_is_one_of_vllm_s(name: str) -> None:
    """`quantization` may be a plugin's, which then has to be installed beside vLLM."""
    known, plugin = wheel(name), wheel(PLUGIN)
    for flag, value in itertools.chain.from_iterable(map(pairs, commands())):
        if flag in CHOICES:
            assert value in map(str, known["literals"][CHOICES[flag]])
        elif flag == "tool-call-parser":
            assert value in known["strings"]
        elif flag == "quantization":
            assert value in {*known["literals"]["QuantizationMethods"], *plugin["strings"]}
    assert set(arguments.LORA_RANKS) <= set(known["literals"]["MaxLoRARanks"])
    assert "bitsandbytes = vllm_bnb_plugin:register" in plugin["entry_points"]


@pytest.mark.parametrize("name", VLLM)
def test_every_variable_is_one_of_vllm_s(name: str) -> None:
    known = set(wheel(name)["variables"])
    for has_gpu, sleep in itertools.product((False, True), (0, 1)):
        ours = arguments.environment(
            VllmEngineConfig(name="vllm"), MODEL, inherited={}, key="k", sockets=Path("s"), sleep=sleep, has_gpu=has_gpu
        )
        assert {each for each in ours if each.startswith("VLLM_")} <= known


@pytest.mark.parametrize("name", VLLM)
def test_every_name_that_is_imported_there_is_defined(name: str) -> None:
    """Imported by the probe program, or run by `python -m`."""
    modules = wheel(name)["modules"]
    assert "main" in modules[MODULE] or MODULE in modules
    for node in ast.walk(ast.parse(PROGRAM)):
        if isinstance(node, ast.ImportFrom):
            assert node.module in modules, f"{node.module}: add it to tests/support/others/gpu_wheels.py MODULES"
            assert {alias.name for alias in node.names} <= {*modules[node.module]}
        elif isinstance(node, ast.Import):
            ours = {alias.name for alias in node.names if alias.name.startswith("vllm.")}
            assert ours <= modules.keys()


# --- what is sent to it -----------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
SAMPLING = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    max_tokens=4,
    stop=("x",),
    stop_ids=(3,),
    seed=1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((1, 0.5),),
    min_tokens=1,
    ignore_eos=True,
)
BODIES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/load_lora_adapter": "LoadLoRAAdapterRequest",
    "/v1/unload_lora_adapter": "UnloadLoRAAdapterRequest",
}


async def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """Calls of an engine that samples in every way, swaps adapters, scores on replicas, sleeps and wakes."""
    monkeypatch.setattr(arguments, "has_gpu", lambda inherited: True)
    fake = Fake(tmp_path)
    chat = Request(
        model="policy",
        messages=[{"role": "user", "content": "hello"}],
        sampling=SAMPLING,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look"}},
        template_kwargs={"enable_thinking": False},
        wants_logprobs=True,
        top_logprobs=3,
    )
    as_json = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    formatted = Request(model="policy", messages=chat.messages, sampling=SAMPLING, response_format=as_json)
    plain = Request(model="policy", prompt=[1, 2, 3], sampling=SAMPLING, echo=True, wants_logprobs=True, top_logprobs=2)
    async with fake.running(sleep=2, replicas=2, env={"CUDA_VISIBLE_DEVICES": "0,1"}) as engine:
        for step in (1, 2):
            await engine.load(fake.adapter(f"adapter-{step}"), step)
            for request in (chat, formatted, plain):
                await engine.backend.reply(request)
                _ = [chunk async for chunk in engine.backend.stream(request)]
        await engine.score([1, 2, 3])
        await engine.sleep()
        await engine.wake()
        await engine.occupancy()
    return [call for call in fake.calls() if "path" in call]


@pytest.mark.parametrize("name", VLLM)
async def test_every_call_is_one_of_vllm_s(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routes, body fields and query parameters. vLLM silently ignores unknown fields."""
    known = wheel(name)
    routes = {route.split(" ")[1]: parameters for route, parameters in known["routes"].items()}
    calls = await session(tmp_path, monkeypatch)
    assert {call["path"] for call in calls} >= {*BODIES, "/sleep", "/wake_up", "/collective_rpc"}
    for call in calls:
        path, body = call["path"], call["body"]
        if path == "/metrics":  # mounted by prometheus-client
            continue
        assert path in routes, f"{path} is no route of {name}"
        query = dict(parse_qsl(call["query"]))
        assert query.keys() <= {*routes[path]}
        assert query.get("mode", "wait") in known["literals"]["PauseMode"]
        if path in BODIES:
            assert body.keys() <= {*known["classes"][BODIES[path]]}, f"{path}: {body}"
        if path == "/collective_rpc":
            assert f"Worker.{body['method']}" in known["functions"] and body.keys() <= {*routes[path]}
        options = body.get("stream_options") or {}
        assert options.keys() <= {*known["classes"]["StreamOptions"]}
    assert any(call["rank"] for call in calls) and "X-data-parallel-rank" in known["strings"]


@pytest.mark.parametrize("name", VLLM)
def test_the_answers_of_the_fake_server_are_those_of_vllm(name: str) -> None:
    """The engine reads them in all other tests."""
    classes, server = wheel(name)["classes"], Server("m", None)
    chat = server.answer({"model": "m", "messages": [{"content": "a"}]}, "a")
    text = server.answer({"model": "m", "prompt": [1, 2], "prompt_logprobs": 0}, "")
    answers = [
        (text, "CompletionResponse"),
        (text["choices"][0], "CompletionResponseChoice"),
        (text["choices"][0]["logprobs"], "CompletionLogProbs"),
        (chat["choices"][0], "ChatCompletionResponseChoice"),
        (chat["choices"][0]["message"], "ChatMessage"),
        (chat["choices"][0]["logprobs"], "ChatCompletionLogProbs"),
        (chat["choices"][0]["logprobs"]["content"][0], "ChatCompletionLogProbsContent"),
    ]
    prompt = chat.pop("prompt_token_ids")
    assert prompt and "prompt_token_ids" in classes["ChatCompletionResponse"]
    text.pop("prompt_token_ids")  # completions report it per choice
    for answer, kind in [(chat, "ChatCompletionResponse"), *answers]:
        assert answer.keys() <= {*classes[kind]}, kind


@pytest.mark.parametrize("name", VLLM)
def test_every_gauge_that_is_read_is_one_of_vllm_s(name: str) -> None:
    gauges = [f"vllm:{each}" for each in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    assert {*gauges} <= {*wheel(name)["strings"]}
    text = "\n".join(f'{gauge}{{engine="0"}} 0.5' for gauge in gauges)
    assert control.parse_metrics(text) is not None


# --- Unsloth ----------------------------------------------------------------------------------------------------------


def unsloth_calls() -> dict[str, set[str]]:
    """The keywords of each call into Unsloth, by the source of our learner. Example: {"FastLanguageModel.x": {"r"}}"""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(Path(unsloth.__file__).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("unsloth."):
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            found.setdefault(ast.unparse(node.func).removeprefix("unsloth."), set()).update(keywords)
    return found


@pytest.mark.parametrize("name", UNSLOTH)
def test_every_argument_for_unsloth_is_one_of_its_own(name: str) -> None:
    """Its functions accept any keyword, and ignore renamed keywords."""
    functions, calls = wheel(name)["functions"], unsloth_calls()
    assert calls.keys() == {"FastLanguageModel.from_pretrained", "FastLanguageModel.get_peft_model"}
    assert calls["FastLanguageModel.from_pretrained"] <= {*functions["FastLanguageModel.from_pretrained"]}
    for kind in ("FastLlamaModel", "FastBaseModel"):
        assert calls["FastLanguageModel.get_peft_model"] <= {*functions[f"{kind}.get_peft_model"]}
    assert "FastLanguageModel" in wheel(name)["modules"]["unsloth.models"]


@pytest.mark.parametrize("name", UNSLOTH)
def test_every_variable_for_unsloth_is_one_of_its_own(name: str) -> None:
    known = {*wheel(name)["variables"], *wheel(name.replace("unsloth", "unsloth_zoo"))["variables"]}
    tree = ast.parse(Path(unsloth.__file__).read_text())
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    ours = {each for each in constants if isinstance(each, str) and each.startswith("UNSLOTH_")}
    assert ours and ours <= known
