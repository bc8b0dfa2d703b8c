"""Merged weights: the policy as a standalone model, the proof that it equals the policy, and the model card.

The base is loaded in float32, the adapter is merged, and the sum is rounded once to the output dtype. The written model
is then read back. It and base plus adapter in that dtype score the policy's saved prompts, token by token. If logprobs
differ by more than the bound, the export is deleted. An adapter trained on a 4-bit base is merged into the unquantized
base. The card is Markdown for the hub: base, run and step, evaluation, checks.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from art_cli.chat.requests import Sampling
from art_cli.engines.proof import make_probe
from art_cli.models.adapters import merge, on_base
from art_cli.models.device import fitting_device
from art_cli.models.loading import load_weights
from art_cli.models.run_memory import GIB, model_size
from art_cli.models.saved_weights import save_merged
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runs.durable import new_directory
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory, sequence
from art_cli.runtime.errors import DriftError, UsageError
from art_cli.serving.served_model import Source, base_config

log = logging.getLogger(__name__)

# Largest logprob difference per token, by dtype: in nats, and relative for logprobs below -1, because rounding errors
# grow with them. In float32 only the summation order differs. In bfloat16, weights have 8 significant bits. Merging
# rounds the sum, whereas base and adapter were rounded separately.
BOUNDS: dict[str, float] = {"float32": 1e-4, "bfloat16": 5e-1}
MAX_PROMPTS = 32
MAX_TOKENS = 1024  # maximum scored tokens per prompt
WORK = 3 * GIB  # GPU memory apart from weights: logits of MAX_TOKENS tokens, a merged matrix, kernels (an estimate)


def model_card(source: Source, *, evaluation: Mapping[str, float], checks: Mapping[str, object]) -> str:
    """Returns the card's text. `evaluation` has the means at this step, if evaluated; `checks` are the export's
    results.

    For a local base directory, only its name is shown, not its path.
    """
    is_hub_id = not Path(source.base).is_dir()
    facts = {
        "Base model": source.base if is_hub_id else Path(source.base).name,
        "Run": source.run.root.resolve().name if source.run else None,
        "Step": source.step if source.manifest else None,
        "Configuration": source.manifest.config_hash if source.manifest else None,
    }
    header: dict[str, object] = {"library_name": "transformers", "tags": ["art", "reinforcement-learning"]}
    if is_hub_id:
        header["base_model"] = source.base
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---"]
    lines += ["", f"# {source.name}", ""]
    lines += _table({name: value for name, value in facts.items() if value not in (None, "")})
    lines += ["## Evaluation", ""]
    lines += _table(evaluation) if evaluation else ["Not evaluated at this step.", ""]
    lines += ["## Checked against the adapter", "", *_table(checks)]
    return "\n".join(lines)


def _table(rows: Mapping[str, object]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {_shown(value)} |" for name, value in rows.items()), ""]


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


class Exported(NamedTuple):
    """An export, and its logprob differences from the policy."""

    path: Path
    num_prompts: int
    num_tokens: int  # tokens whose logprobs were compared
    max_gap: float  # nats
    mean_gap: float  # nats
    max_share: float  # largest gap as a share of max(1 nat, |logprob|); limited by the bound


def export(source: Source, output: Path, *, dtype: str, bound: float | None) -> Exported:
    """Writes `output`. Raises UsageError for unknown dtypes and if it exists, DriftError for other weights."""
    if dtype not in BOUNDS:
        raise UsageError(f"--dtype {dtype}: one of {', '.join(BOUNDS)}")
    if output.exists():
        raise UsageError(f"{output}: there is something already; choose another name")
    policy = load_source(source, dtype)
    prompts = prompts_for(source, policy)
    wanted = logprobs(policy, prompts)
    if dtype != "float32":
        del policy  # a GPU may not hold both
        policy = load_source(source, "float32")
    with new_directory(output, is_private=False) as directory:
        save_merged(merge(policy), directory, dtype)
        found = logprobs(load_written(source, directory, dtype), prompts)
        exported = compare(output, wanted, found, BOUNDS[dtype] if bound is None else bound)
        write_card(directory, source, exported, dtype)
    return exported


def prompts_for(source: Source, policy: Weights) -> list[list[int]]:
    """Returns the run's saved prompts, or one generated prompt."""
    return saved_prompts(source.run) or [make_probe(policy.vocabulary)]


def logprobs(weights: Weights, prompts: Sequence[list[int]]) -> list[list[float]]:
    return [token_logprobs(weights, ids) for ids in prompts]


def saved_prompts(run: RunDir | None) -> list[list[int]]:
    """Returns the final turns (prompt and sampled tokens) of the run's newest trajectories."""
    if run is None:
        return []
    for path in sorted(run.root.glob("step_*/trajectories.jsonl"), reverse=True):
        played = (trajectory.turns for trajectory in run.lines(path, Trajectory) if trajectory.turns)
        sequences = (sequence(turns, len(turns) - 1)[:MAX_TOKENS] for turns in played)
        if found := list(islice((ids for ids in sequences if len(ids) > 1), MAX_PROMPTS)):
            return found
    log.info("%s: no saved prompts are here, so a made-up one is compared", run.root)
    return []


def compare(output: Path, wanted: Sequence[list[float]], found: Sequence[list[float]], bound: float) -> Exported:
    """Compares the logprobs of the same tokens. Raises DriftError if they differ by more than `bound` (see BOUNDS)."""
    pairs = [pair for ours, theirs in zip(wanted, found, strict=True) for pair in zip(ours, theirs, strict=True)]
    gaps = [abs(a - b) for a, b in pairs]
    max_share = max(gap / max(1.0, abs(a)) for gap, (a, _) in zip(gaps, pairs, strict=True))
    exported = Exported(output, len(wanted), len(gaps), max(gaps), sum(gaps) / len(gaps), max_share)
    if not (exported.max_share <= bound and math.isfinite(exported.mean_gap)):  # a maximum can hide a NaN
        raise DriftError(
            f"{exported.path}: not written: the merged weights are not the policy: over {exported.num_tokens} tokens, "
            f"logprobs differ by up to {exported.max_gap:.2e} nats, {exported.max_share:.2e} of max(1, |logprob|); "
            f"bound {bound:.0e} (--max-gap)"
        )
    return exported


def load_source(source: Source, dtype: str) -> Weights:
    """Returns the policy on its unquantized base in this dtype, on the CPU if the GPU's free memory is too small."""
    config, device = base_config(source).model_copy(update={"dtype": dtype, "quantize": None}), "auto"
    with suppress(AttributeError, OSError, TypeError, ValueError):  # of unknown models; loading reports the error
        size = model_size(source.base).weight_bytes(4 if dtype == "float32" else 2, is_4bit=False)
        device = fitting_device(size + WORK)
    base = load_weights(config, source.base, device=device, named=source.named)
    return base if source.adapter is None else on_base(base, source.adapter)


def load_written(source: Source, directory: Path, dtype: str) -> Weights:
    """Returns the standalone model in `directory`, which was made from `source`."""
    return load_source(Source(source.name, str(directory), None, 0, dtype, source.max_length, Sampling()), dtype)


def write_card(directory: Path, source: Source, exported: Exported, dtype: str) -> None:
    evaluation = {}
    if (run := source.trained_in) is not None and source.manifest is not None:
        lines = [line for line in run.metrics() if line.split == "eval" and line.step == source.step]
        means = lines[-1].metrics if lines else {}
        evaluation = {name: value for name, value in means.items() if not name.startswith("num_")}
    checks = {
        "dtype": dtype,
        "base in training": source.quantize or "as it is",
        "prompts replayed": exported.num_prompts,
        "tokens compared": exported.num_tokens,
        "largest logprob difference, nats": exported.max_gap,
        "mean logprob difference, nats": exported.mean_gap,
    }
    (directory / "README.md").write_text(model_card(source, evaluation=evaluation, checks=checks))
