"""PlainEngine: an engine as a user writes one, in one file, with transformers alone; slow, one call at a time.

It samples from the weights in this process and keeps no cache. `engine: {entry: "plain_engine.py:PlainEngine"}`.
"""

import asyncio
import time

import msgspec
import torch

from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Request
from art_cli.engines import Endpoint, EngineSetup
from art_cli.models.saved_weights import load_checkpoint
from art_cli.models.weights import token_logprobs


class PlainEngine:
    weights = "here"

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self.max_tokens = setup, int(setup.options.get("max_tokens", 16))
        self.endpoint = Endpoint(base_url=None, api_key="", model=setup.name, step=setup.step)
        assert setup.weights is not None
        self.weights, self.backend = setup.weights, self

    async def start(self) -> None:
        pass

    async def load(self, checkpoint, step):
        if not self.setup.shares_weights:
            load_checkpoint(self.weights, checkpoint)
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids):
        return await asyncio.to_thread(token_logprobs, self.weights, token_ids)

    async def sleep(self):
        pass

    async def wake(self):
        pass

    async def watch(self):
        await asyncio.Event().wait()

    async def close(self):
        pass

    def models(self):
        return [self.setup.name]

    async def reply(self, request: Request) -> Reply:
        prompt_ids = self.weights.tokenizer.apply_chat_template(
            request.messages, add_generation_prompt=True, return_dict=False
        )
        choice = await asyncio.to_thread(self.sample, list(prompt_ids), request)
        return Reply(
            id="plain",
            created=int(time.time()),
            model=request.model,
            choices=[choice],
            prompt_ids=list(prompt_ids),
            step=self.endpoint.step,
            sampling=request.sampling,
        )

    def sample(self, prompt_ids: list[int], request: Request) -> Choice:
        draw = torch.Generator().manual_seed(request.sampling.seed or 0)
        stop = self.weights.tokenizer.eos_token_id
        ids, logprobs = [], []
        while len(ids) < (request.sampling.max_tokens or self.max_tokens) and stop not in ids:
            with self.weights.lock, torch.no_grad():
                logits = self.weights.model(torch.tensor([prompt_ids + ids])).logits[0, -1].float()
            row = (logits / request.sampling.temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(row.exp(), 1, generator=draw)))
            logprobs.append(float(row[ids[-1]]))
        text = self.weights.tokenizer.decode(ids, skip_special_tokens=True)
        return Choice(
            index=0,
            message={"role": "assistant", "content": text},
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            finish_reason="stop" if stop in ids else "length",
        )
