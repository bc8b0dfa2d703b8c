"""A small server with vLLM's routes and manners, for tests of what stands around it. Its "weights" are a file's bytes.

    POST /v1/chat/completions  /v1/completions      tokens, logprobs, prompt_logprobs, streams
    POST /v1/load_lora_adapter  /v1/unload_lora_adapter     a name twice is a 400, an unknown one a 404
    GET  /health  /v1/models       POST /sleep  /wake_up  /collective_rpc

The distribution of a token depends on the adapter's bytes and the token before it (`logprobs`). What the last message
says makes it behave: "slow" waits until there is a file `release` beside FAKE_VLLM_CALLS, "die" ends the process,
"hang" never answers, "half" streams a token and then ends it, "core" is answered as when vLLM's engine core died,
"long" as when it is too long, "refuse" as what is no request. A prompt that is scored beside another request ends the
process, as it does vLLM on a CPU. FAKE_VLLM is a manner from the start. Each call is a line
of the file FAKE_VLLM_CALLS; its first line says how the process was started.
"""

import argparse
import asyncio
import json
import math
import os
import pkgutil
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]

VOCAB = 48
MANNER = os.environ.get("FAKE_VLLM", "")


def seed_of(adapter: Path | None) -> int:
    return 1 if adapter is None else zlib.crc32((adapter / "adapter_model.safetensors").read_bytes()) % 1000 + 2


def logprobs(seed: int, before: int, temperature: float = 1.0) -> list[float]:
    """[VOCAB] of the token that follows `before`."""
    logits = [3 * math.sin(seed * (token + 1) + before) / (temperature or 1.0) for token in range(VOCAB)]
    norm = math.log(sum(map(math.exp, logits)))
    return [logit - norm for logit in logits]


def encode(text: str) -> list[int]:
    return [ord(letter) % VOCAB for letter in text]


class Fake:
    def __init__(self, model: str, calls: Path | None) -> None:
        self.model = model
        self.calls = calls
        self.adapters: dict[str, int] = {}  # name -> seed
        self.is_healthy = True
        self.num_chats = 0  # number of chats in flight
        self.rank: str | None = None  # of the last call
        self.cached: int | None = None  # the seed whose keys and values a stale cache holds

    def note(self, line: Json) -> None:
        if self.calls is not None:
            with self.calls.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def error(self, status: int, message: str) -> Response:
        body = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return JSONResponse({"error": body}, status)

    def is_first(self, what: str) -> bool:
        """Whether no server of this test has asked that before."""
        assert self.calls is not None
        mark = self.calls.with_name(f"{what}.done")
        is_first = not mark.exists()
        mark.touch()
        return is_first

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        body = json.loads(await request.body() or b"{}")
        if path != "/health":
            self.rank = request.headers.get("x-data-parallel-rank")
            self.note({"path": path, "query": request.url.query, "body": body, "rank": self.rank})
        is_guarded = path.startswith("/v1") and "VLLM_API_KEY" in os.environ
        if is_guarded and request.headers.get("authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        match path:
            case "/health":
                return Response(status_code=200 if self.is_healthy else 503)
            case "/v1/models":
                return JSONResponse({"data": [{"id": name} for name in (self.model, *self.adapters)]})
            case "/v1/load_lora_adapter":
                return self.load(body["lora_name"], Path(body["lora_path"]))
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return self.error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
                return PlainTextResponse("Success")
            case "/v1/chat/completions" | "/v1/completions":
                return await self.complete(body)
            case _:
                return JSONResponse({"status": "ok"})

    def load(self, name: str, path: Path) -> Response:
        if MANNER == "die at load":
            os._exit(5)
        if name in self.adapters:
            return self.error(400, f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = seed_of(path)
        return PlainTextResponse("Success")

    async def complete(self, body: Json) -> Response:
        if body["model"] != self.model and body["model"] not in self.adapters:
            return self.error(404, f"The model `{body['model']}` does not exist.")
        if not 0 <= body.get("temperature", 1.0) <= 2:
            return self.error(400, f"temperature must be in [0, 2], got {body['temperature']}.")
        said = body["messages"][-1]["content"] if "messages" in body else ""
        if said == "long":
            return self.error(400, "This model's maximum context length is 64 tokens. However, ...")
        if said == "refuse":
            return self.error(400, "Grammar error: Invalid type: nonsense")
        if said == "core":
            self.is_healthy = False
            return self.error(500, "EngineCore encountered an issue.")
        if "prompt_logprobs" in body and self.num_chats:
            os._exit(7)
        if MANNER == "dies of the first score" and "prompt_logprobs" in body and self.is_first("score"):
            self.is_healthy = False
            return self.error(500, "EngineCore encountered an issue.")
        self.num_chats += "messages" in body
        try:
            await self.behave(said)
        finally:
            self.num_chats -= "messages" in body
        answer = self.answer(body, said)
        if not body.get("stream"):
            return JSONResponse(answer)
        return StreamingResponse(self.events(answer, said), media_type="text/event-stream")

    async def behave(self, said: str) -> None:
        if said == "die":
            os._exit(9)
        if said == "hang":
            await asyncio.Event().wait()
        assert self.calls is not None or said != "slow"
        while said == "slow" and self.calls is not None and not self.calls.with_name("release").exists():
            await asyncio.sleep(0.02)

    def answer(self, body: Json, said: str) -> Json:
        is_chat = "messages" in body
        prompt = encode(said) if is_chat else body["prompt"]
        seed = self.adapters.get(body["model"], 1)
        if self.cached is None:
            self.cached = seed
        if MANNER == "ranks differ" and self.rank == "1":
            seed += 1
        if MANNER == "stale" and "prompt_logprobs" not in body:
            seed = self.cached
        temperature = 1.0 if MANNER == "raw" else body.get("temperature", 1.0)
        draw = random.Random(body.get("seed"))
        ids, found, tops = [], [], []
        for _ in range(min(body.get("max_tokens") or 16, 16)):
            row = logprobs(seed, ([*prompt, *ids] or [0])[-1], temperature)
            token = max(range(VOCAB), key=row.__getitem__)
            if body.get("temperature", 1.0) > 0:
                token = draw.choices(range(VOCAB), [math.exp(logprob) for logprob in row])[0]
            if MANNER == "raw" and body.get("temperature") == 1.0:
                token = min(range(VOCAB), key=row.__getitem__)  # a token that no other reply lists
            ids.append(token)
            found.append(row[token])
            likeliest = sorted(range(VOCAB), key=row.__getitem__, reverse=True)[:20]
            tops.append({f"token_id:{id}": row[id] for id in {*likeliest, token}})
        choice: Json = {"index": 0, "finish_reason": "length", "token_ids": ids}
        names = [f"token_id:{token}" for token in ids]
        if is_chat:
            content = [{"token": name, "logprob": value} for name, value in zip(names, found, strict=True)]
            text = "".join(chr(97 + token % 26) for token in ids)
            choice |= {"message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}
        else:
            choice |= {"text": "", "logprobs": {"tokens": names, "token_logprobs": found, "top_logprobs": tops}}
        if "prompt_logprobs" in body:
            pairs = zip(prompt, prompt[1:], strict=False)
            given = [{str(after): {"logprob": logprobs(seed, before)[after]}} for before, after in pairs]
            choice["prompt_logprobs"] = [None, *given]
        return {"id": "x", "created": 1, "model": body["model"], "choices": [choice], "prompt_token_ids": prompt}

    async def events(self, answer: Json, said: str) -> Any:
        """The whole answer as one chunk, then the end."""
        choice = answer["choices"][0]
        if "message" in choice:
            choice["delta"] = choice.pop("message")
        if said == "half":
            choice |= {"finish_reason": None, "token_ids": choice["token_ids"][:1]}
            choice["logprobs"]["content"] = choice["logprobs"]["content"][:1]
            yield f"data: {json.dumps(answer)}\n\n"
            await asyncio.sleep(0.2)  # until it is sent
            os._exit(9)
        yield f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--middleware", action="append", default=[])
    known, _ = parser.parse_known_args()
    calls = Path(os.environ["FAKE_VLLM_CALLS"]) if "FAKE_VLLM_CALLS" in os.environ else None
    fake = Fake(known.served_model_name, calls)
    helper = subprocess.Popen(["sleep", "600"])  # vLLM's engine core is a process of its own too
    variables = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    fake.note({"argv": sys.argv[1:], "environment": variables, "pids": [os.getpid(), helper.pid]})
    sys.stderr.write(f"fake: key {os.environ.get('VLLM_API_KEY')}\n")
    if MANNER == "no start":
        sys.stderr.write("ValueError: no such model\n")
        helper.kill()
        sys.exit(3)
    if MANNER.startswith("log "):  # as the server that wrote this log ended
        sys.stderr.write(Path(MANNER.removeprefix("log ")).read_text())
        helper.kill()
        sys.exit(1)
    methods = ["GET", "POST"]
    app = Starlette(routes=[Route("/{path:path}", fake.handle, methods=methods)])
    for middleware in known.middleware:
        app.add_middleware(pkgutil.resolve_name(middleware))
    if MANNER == "silent":
        app = Starlette(routes=[])
        asyncio.run(asyncio.sleep(600))
    uvicorn.run(app, host="127.0.0.1", port=known.port, log_level="warning")
    helper.kill()


if __name__ == "__main__":
    main()
