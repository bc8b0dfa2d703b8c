"""The routes of models: made, trained, saved and loaded. A model's requests are run in the order of their numbers."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.tinker.server import passes
from art_cli.tinker.server.base_model import Parts
from art_cli.tinker.server.checkpoint_store import make_notes, parse
from art_cli.tinker.server.models import AdamParams, NewModel, SaveTo, new_place
from art_cli.tinker.server.ranges import convert
from art_cli.tinker.server.sessions import BackendState
from art_cli.tinker.server.wire import (
    PROTO,
    CreateModel,
    Load,
    OfModel,
    OptimStep,
    Save,
    content_type,
    digest_of,
    done,
    reply,
)

Json = dict[str, Any]


class ModelRoutes:
    """Each method gets the request and its owner."""

    def __init__(self, state: BackendState) -> None:
        self.state = state

    async def create_model(self, http: Request, owner: str) -> Response:
        fields, digest = await self.state.bodies.signed(http)
        asked = convert(fields, CreateModel)
        self.state.sessions.active(asked.session_id, owner)
        self.state.base.check(asked.base_model)
        if asked.lora_config is None:
            raise invalid("lora_config: full fine-tuning is not served; every model is an adapter")
        if asked.optimizer_config.get("type", "adamw") != "adamw":
            raise invalid(f"optimizer_config.type {asked.optimizer_config['type']!r}: only adamw is served")
        lora = asked.lora_config
        new = NewModel(
            asked.session_id,
            asked.model_seq_id,
            lora.rank,
            lora.seed or 0,
            Parts(lora.train_attn, lora.train_mlp),
            user_metadata=asked.user_metadata,
        )
        return reply({"request_id": self.state.models.create(new, owner, digest), "model_id": new.id})

    async def get_info(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), OfModel)
        model = self.state.models.get(asked.model_id, owner)
        # the SDK loads the tokenizer of this name, from the hub or from a directory of the client
        data = {"arch": type(self.state.base.weights.model).__name__, "model_name": self.state.base.name}
        return reply(
            {
                "type": "get_info",
                "model_id": asked.model_id,
                "model_name": self.state.base.name,
                "model_data": {**data, "tokenizer_id": self.state.base.weights.base},
                "is_lora": model.run.rank > 0,
                "lora_rank": model.run.rank or None,
            }
        )

    async def unload_model(self, http: Request, owner: str) -> Response:
        fields, digest = await self.state.bodies.signed(http)
        asked = convert(fields, OfModel)
        await self.state.models.unload(asked.model_id, owner)
        future, is_new = self.state.futures.add(f"{asked.model_id}:unload", owner, digest)
        if is_new:
            self.state.futures.settle(future, done({"model_id": asked.model_id, "type": "unload_model"}))
        return reply({"request_id": future.id})

    async def forward(self, http: Request, owner: str) -> Response:
        return await self._run_pass(http, owner, backward=False)

    async def forward_backward(self, http: Request, owner: str) -> Response:
        return await self._run_pass(http, owner, backward=True)

    async def _run_pass(self, http: Request, owner: str, *, backward: bool) -> Response:
        body = await self.state.bodies.raw(http)
        digest = digest_of(http, body)
        try:
            if content_type(http.headers) == PROTO:
                asked = await self.state.bodies.reader.read(passes.of_proto, body)
            else:
                asked = await self.state.bodies.reader.read(lambda: passes.of_json(body, backward=backward))
            id = self.state.models.run_pass(asked, owner, digest)
        except passes.BadPass as error:
            id = self.state.models.refuse(error.model_id, error.seq_id, error, owner, digest, is_pass=backward)
        return reply({"request_id": id})

    async def _in_turn(self, http: Request, owner: str, submit: Callable[[Json, bytes], str]) -> Response:
        """Returns the result of `submit` for the body. A refused request of a model takes its turn and fails in it."""
        fields, digest = await self.state.bodies.signed(http)
        try:
            id = submit(fields, digest)
        except ChatError as error:
            if error.status != 400:
                raise
            id = self.state.models.refuse(
                fields.get("model_id"), fields.get("seq_id"), error, owner, digest, is_pass=False
            )
        return reply({"request_id": id})

    async def optim_step(self, http: Request, owner: str) -> Response:
        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, OptimStep)
            if asked.optimizer_params is not None:
                raise invalid("optimizer_params: only adam_params are served")
            return self.state.models.update(
                asked.model_id, asked.seq_id, asked.adam_params or AdamParams(), owner, digest
            )

        return await self._in_turn(http, owner, submit)

    # --- their weights ------------------------------------------------------------------------------------------------

    async def save_weights(self, http: Request, owner: str) -> Response:
        return await self._save(http, owner, "weights")

    async def save_for_sampler(self, http: Request, owner: str) -> Response:
        return await self._save(http, owner, "sampler_weights")

    async def save_external(self, http: Request, owner: str) -> Response:
        return await self._save(http, owner, "external_weights")

    async def _save(self, http: Request, owner: str, kind: str) -> Response:
        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, Save)
            if asked.age_encryption_recipients:
                raise invalid("age_encryption_recipients: files are not encrypted here")
            if asked.path is None and kind == "sampler_weights" and asked.sampling_session_seq_id is not None:
                session = asked.model_id.partition(":")[0]
                sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
                return self.state.models.sample_from(asked.model_id, asked.seq_id, sampler, owner, digest)
            at = new_place(asked.model_id, kind, asked.path)
            to = SaveTo(at, make_notes(asked.ttl_seconds, asked.user_metadata), asked.overwrite)
            return self.state.models.save(asked.model_id, asked.seq_id, to, owner, digest)

        return await self._in_turn(http, owner, submit)

    async def load_weights(self, http: Request, owner: str) -> Response:
        """Loads into a model, or as a new one: its session and number are given then."""

        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, Load)
            at = parse(asked.path)
            self.state.base.check(asked.base_model)
            if asked.weights_access_token is not None:
                raise invalid("weights_access_token: there are no other accounts; publish the checkpoint instead")
            if (asked.optimizer_config or {}).get("type", "adamw") != "adamw":
                raise invalid("optimizer_config: only adamw is served")
            if asked.model_id is not None:
                return self.state.models.load(asked.model_id, asked.seq_id, at, asked.optimizer, owner, digest)
            if asked.session_id is None or asked.model_seq_id is None:
                raise invalid("model_id and seq_id are required, or session_id and model_seq_id")
            self.state.sessions.active(asked.session_id, owner)
            new = NewModel(
                asked.session_id,
                asked.model_seq_id,
                source=at,
                with_optimizer=asked.optimizer,
                user_metadata=asked.user_metadata,
            )
            return self.state.models.create(new, owner, digest)

        return await self._in_turn(http, owner, submit)
