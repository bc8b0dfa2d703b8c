"""Calls every public method of the installed tinker SDK on a server, and prints what came of it as JSON. Not a test:
test_sdk.py runs it in a Python of its own for each version.

    python sdk_methods.py ADDRESS -> {"version": "0.38.0", "supported": [...], "refused": {"RestClient.whoami": "..."}}

A method is supported if its call gives a result, and refused if the server's answer names what is not served. Anything
else is a failure.
"""

import asyncio
import inspect
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import tinker  # noqa: E402
from tinker import types  # noqa: E402

IDS = list(range(40, 60))
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},
    )
]
ADAM = types.AdamParams(learning_rate=1e-3)
PARAMS = types.SamplingParams(max_tokens=4, seed=1)
PROMPT = types.ModelInput.from_ints(IDS[:5])
# What a refusal says: the server's words; the SDK's own where the server has no accounts; and a fault of SDK 0.24.1,
# whose get_audit_log_async asks no server at all.
REFUSALS = ("is not served", "whoami requires JWT auth", "called from incorrect event loop")
NOT_OURS = {"on_queue_state_change", "get_telemetry", "holder", "get_console_url"}  # these ask no server


def resolve(found: Any) -> Any:
    """The result behind whatever a method gives: a coroutine, a future, or the result itself."""
    for _ in range(3):
        if inspect.isawaitable(found) and not hasattr(found, "result"):

            async def wait(awaited: Any = found) -> Any:
                return await awaited

            found = asyncio.run(wait())
        elif hasattr(found, "result") and callable(found.result):
            found = found.result()
        else:
            return found
    return found


class Twin:
    """A client whose method is the asynchronous one of that name while `wanted` says so."""

    wanted = ""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, f"{name}_async" if Twin.wanted == f"{name}_async" else name)


def loss(data: Any, logprobs: Any) -> Any:
    return -sum(each.sum() for each in logprobs), {}


def cases(address: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """Of each client its methods' calls, by the name without `_async`."""
    service: Any = Twin(tinker.ServiceClient(base_url=address, api_key="tml-x"))
    base = service.get_server_capabilities().supported_models[0].model_name
    trainer: Any = Twin(resolve(service.create_lora_training_client(base_model=base, rank=4)))
    state = resolve(trainer.save_state("state")).path
    sampled = resolve(trainer.save_weights_for_sampler("sampler")).path
    sampler: Any = Twin(resolve(service.create_sampling_client(model_path=sampled)))
    rest: Any = Twin(service.create_rest_client())
    run = trainer.model_id
    session = run.partition(":")[0]
    sampler_id = sampler._sampling_session_id
    numbers = iter(range(10**6))

    def saved() -> str:
        return str(resolve(trainer.save_state(f"extra-{next(numbers)}")).path)

    def saved_id() -> str:
        return saved().split("/", 3)[3]

    def external() -> str:
        return str(resolve(trainer.save_weights_external(f"out-{next(numbers)}")).path)

    def loaded(with_optimizer: bool) -> Any:
        fresh = resolve(service.create_lora_training_client(base_model=base, rank=4))
        return (fresh.load_state_with_optimizer if with_optimizer else fresh.load_state)(state)

    def other_service() -> Any:
        other = tinker.ServiceClient(base_url=address, api_key="tml-x")
        other.holder  # noqa: B018  makes its session
        return other

    return {
        "ServiceClient": {
            "get_server_capabilities": service.get_server_capabilities,
            "create_lora_training_client": lambda: service.create_lora_training_client(base_model=base, rank=4),
            "create_training_client_from_state": lambda: service.create_training_client_from_state(state),
            "create_training_client_from_state_with_optimizer": lambda: (
                service.create_training_client_from_state_with_optimizer(state)
            ),
            "create_sampling_client": lambda: service.create_sampling_client(base_model=base),
            "create_rest_client": service.create_rest_client,
            "copy_weights": lambda: service.copy_weights(state),
            "create_custom_loss": lambda: service.create_custom_loss(
                lambda logprobs, weights: (-(logprobs * weights).sum(), {}), {"logprobs": 1, "weights": 1}
            ),
            "close": lambda: other_service().close("success"),
        },
        "TrainingClient": {
            "forward": lambda: trainer.forward(DATA, "cross_entropy"),
            "forward_backward": lambda: trainer.forward_backward(DATA, "cross_entropy"),
            "forward_backward_custom": lambda: trainer.forward_backward_custom(DATA, loss),
            "optim_step": lambda: trainer.optim_step(ADAM),
            "save_state": lambda: trainer.save_state(f"state-{next(numbers)}"),
            "load_state": lambda: loaded(False),
            "load_state_with_optimizer": lambda: loaded(True),
            "save_weights_for_sampler": lambda: trainer.save_weights_for_sampler(f"sampler-{next(numbers)}"),
            "save_weights_external": lambda: trainer.save_weights_external(f"external-{next(numbers)}"),
            "get_info": trainer.get_info,
            "get_tokenizer": trainer.get_tokenizer,
            "create_sampling_client": lambda: trainer.create_sampling_client(sampled),
            "save_weights_and_get_sampling_client": trainer.save_weights_and_get_sampling_client,
        },
        "SamplingClient": {
            "create": lambda: type(sampler.client).create(service.holder, base_model=base),
            "sample": lambda: sampler.sample(PROMPT, num_samples=2, sampling_params=PARAMS),
            "compute_logprobs": lambda: sampler.compute_logprobs(PROMPT),
            "get_tokenizer": sampler.get_tokenizer,
            "get_base_model": sampler.get_base_model,
            "get_sampler_handle": lambda: sampler.get_sampler_handle(),
            "from_sampler_handle": lambda: type(sampler.client).from_sampler_handle(
                resolve(sampler.get_sampler_handle()), api_key="tml-x"
            ),
        },
        "RestClient": {
            "get_server_capabilities": lambda: rest.get_server_capabilities(),
            "get_training_run": lambda: rest.get_training_run(run),
            "get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(state),
            "get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(state),
            "list_training_runs": rest.list_training_runs,
            "list_checkpoints": lambda: rest.list_checkpoints(run),
            "get_checkpoint_archive_url": lambda: rest.get_checkpoint_archive_url(run, saved_id()),
            "get_checkpoint_archive_url_from_tinker_path": lambda: rest.get_checkpoint_archive_url_from_tinker_path(
                state
            ),
            "get_external_weights_urls": lambda: rest.get_external_weights_urls(external()),
            "delete_checkpoint": lambda: rest.delete_checkpoint(run, saved_id()),
            "delete_checkpoint_from_tinker_path": lambda: rest.delete_checkpoint_from_tinker_path(saved()),
            "publish_checkpoint_from_tinker_path": lambda: rest.publish_checkpoint_from_tinker_path(state),
            "unpublish_checkpoint_from_tinker_path": lambda: rest.unpublish_checkpoint_from_tinker_path(state),
            "set_checkpoint_ttl_from_tinker_path": lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 7200),
            "list_user_checkpoints": rest.list_user_checkpoints,
            "get_session": lambda: rest.get_session(session),
            "list_sessions": rest.list_sessions,
            "search_sessions": lambda: rest.search_sessions(types.SessionSearchRequest(session_id=session)),
            "get_sampler": lambda: rest.get_sampler(sampler_id),
            "copy_weights": lambda: rest.copy_weights(state, destination_project_id="p"),
            "assign_session_project": lambda: rest.assign_session_project(session, "p"),
            "export_session_trace": lambda: rest.export_session_trace(session),
            "whoami": lambda: rest.whoami(),
            "get_audit_log": lambda: called(rest.get_audit_log),
            "get_billing_usage": lambda: called(rest.get_billing_usage),
            "get_current_checkpoint_storage_usage": lambda: called(rest.get_current_checkpoint_storage_usage),
        },
    }


def called(method: Any) -> Any:
    """The method's result, with a day for every argument that it must have."""
    import datetime

    day = datetime.datetime(2026, 8, 1, tzinfo=datetime.UTC)
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    positional = [day for p in needed if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD]
    return method(*positional, **{p.name: day for p in needed if p.kind is p.KEYWORD_ONLY})


def main(address: str) -> None:
    found: dict[str, Any] = {"version": tinker.__version__, "supported": [], "refused": {}, "failed": {}, "local": []}
    calls = cases(address)
    from tinker.lib.public_interfaces import rest_client, sampling_client, service_client, training_client

    for module in (service_client, training_client, sampling_client, rest_client):
        client = next(
            name for name in calls if hasattr(module, name) and name.lower() in module.__name__.replace("_", "")
        )
        for name in [name for name in vars(getattr(module, client)) if not name.startswith("_")]:
            named = f"{client}.{name}"
            if name in NOT_OURS:
                found["local"].append(named)
                continue
            call = calls[client].get(name.removesuffix("_async"))
            try:
                assert call is not None, "this script does not know the method"
                Twin.wanted = name
                resolve(call())
                found["supported"].append(named)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                found["refused" if any(words in text for words in REFUSALS) else "failed"][named] = text
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
