"""`art export`: writes a checkpoint as a whole model and checks it; uploads it to the hub with --push."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_cli.cli import Base, Best, Json, Last, named_policy, which_checkpoint
from art_cli.runtime.errors import ArtError, UsageError

if TYPE_CHECKING:
    from art_cli.serving.merged_export import Exported


def run(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint or a run.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A new directory.", show_default=False)],
    is_best: Best = False,
    is_last: Last = False,
    base: Base = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32 or bfloat16; if not given, that of the run, or float32."),
    ] = None,
    max_gap: Annotated[
        float | None,
        typer.Option("--max-gap", metavar="NATS", help="Largest difference of a logprob; the dtype's, if not given."),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload it to the hub too, with the token HF_TOKEN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge a checkpoint into weights that stand alone.

    Writes a model that transformers and vLLM load, with a model card. The run's saved prompts must get the same
    logprobs from the merged weights as from the adapter, else the export fails.

    \b
    art export runs/mine -o mine-merged --dtype bfloat16      its best evaluated checkpoint; --last: its newest
    """
    from art_cli.engines.proof import make_probe
    from art_cli.models.loading import find_base
    from art_cli.runtime.scratch import scratch
    from art_cli.serving.merged_export import export
    from art_cli.serving.served_model import find_source

    token = _find_token() if push is not None else None
    with scratch("export") as directory:
        if base is not None:
            base = find_base(base, directory=Path.cwd(), built=directory / "base", named="--base")
        source = find_source(named_policy(checkpoint), which=which_checkpoint(is_best, is_last), base=base)
        dtype = dtype or (source.dtype if source.dtype != "auto" else "float32")
        exported = export(source, output, dtype=dtype, bound=max_gap, probe=make_probe)
    url = _push(exported.path, push, token) if push is not None and token is not None else None
    if as_json:
        result = {**exported._asdict(), "path": str(exported.path), "dtype": dtype, "url": url}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(_as_text(exported, dtype) + (f"  pushed to {url}\n" if url else ""))


def _as_text(exported: "Exported", dtype: str) -> str:
    note = (
        f"  trained on the base in {exported.quantize}, merged into the whole one, which gives other logprobs: "
        f"art eval measures the effect on rewards\n"
    )
    return (
        f"{exported.path}: {dtype}, stands alone: art serve {shlex.quote(str(exported.path))}\n"
        f"  {exported.num_prompts} prompts replayed, {exported.num_tokens} tokens: logprobs differ by at most "
        f"{exported.max_gap:.2e} nats, {exported.mean_gap:.2e} in the mean\n" + (note if exported.quantize else "")
    )


def _find_token() -> str:
    """Returns the hub's token, before any work is done. Raises UsageError if there is none."""
    import huggingface_hub

    token = huggingface_hub.get_token()
    if not token:
        raise UsageError("--push: no token for the hub; set HF_TOKEN, or log in with `hf auth login`")
    return token


def _push(directory: Path, repo: str, token: str) -> str:
    """Uploads the model and returns its address; a new repository is private. Raises ArtError with the hub's words."""
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=token)
    try:
        url = hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=directory, commit_message="art export")
    except Exception as error:  # the boundary to the hub's client, which raises any error of its transport
        summary = " ".join(str(error).replace(token, "***").split())[:200]
        raise ArtError(f"--push {repo}: {summary}; {directory} is written, push it again by hand") from error
    return str(url)
