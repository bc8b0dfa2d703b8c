"""A client that the official SDK makes, which goes on from its last checkpoint when it is started again. Not a test.

    python lossy_client.py ADDRESS LEDGER BATCHES

BATCHES is a JSON file with the token ids of each step: [[[1, 2, 3], [4, 5, 6]], ...]. A step is a pass for each row, an
update and a checkpoint, whose path is written to the file LEDGER. So runs that were disturbed in any way end with the
same weights.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import tinker  # noqa: E402
from tinker import types  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)


def datum(ids: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def client_of(made: Any) -> Any:
    """What a client-creating method gives: a future in SDK 0.38, the client itself before."""
    return made.result() if hasattr(made, "result") else made


def main(address: str, ledger: Path, batches: list[list[list[int]]]) -> None:
    service = tinker.ServiceClient(base_url=address, api_key="tml-x")
    done = json.loads(ledger.read_bytes()) if ledger.exists() else {"step": 0, "path": None}
    if done["path"] is None:
        base = service.get_server_capabilities().supported_models[0].model_name
        trainer = client_of(service.create_lora_training_client(base_model=base, rank=4, seed=5))
    else:
        trainer = client_of(service.create_training_client_from_state_with_optimizer(done["path"]))
    for step, rows in enumerate(batches[done["step"] :], done["step"]):
        asked = [trainer.forward_backward([datum(ids)], "cross_entropy") for ids in rows]
        asked.append(trainer.optim_step(ADAM))
        for future in asked:
            future.result()
        path = trainer.save_state(f"at-{step + 1}").result().path
        beside = ledger.with_suffix(".tmp")
        beside.write_text(json.dumps({"step": step + 1, "path": path}))
        beside.replace(ledger)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_bytes()))
    sys.stdout.flush()
    os._exit(0)  # a session that ends by itself unloads nothing that matters here; its checkpoints stay
