"""`art export`: writes and checks a merged model or GGUF file; --push uploads it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from art_cli.cli import Base, Best, Json, Last, named_policy, print_result, which_checkpoint
from art_cli.runtime.errors import ArtError, UsageError

if TYPE_CHECKING:
    from art_cli.serving.merged_export import Exported


def run(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="A checkpoint or a run.", show_default=False)],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="A new directory.", show_default=False)],
    is_best: Best = False,
    is_last: Last = False,
    base: Base = None,
    dtype: Annotated[str | None, Option("--dtype", help="float32 or bfloat16; default: the run's.")] = None,
    gguf: Annotated[str | None, Option("--gguf", metavar="KIND", help="Write GGUF: f16, q8_0 or q4_0.")] = None,
    gguf_adapter: Annotated[bool, Option("--gguf-adapter", help="Write only the adapter, as GGUF.")] = False,
    max_gap: Annotated[float | None, Option("--max-gap", metavar="NATS", help="Largest logprob difference.")] = None,
    push: Annotated[str | None, Option("--push", metavar="REPO", help="Also upload to the hub (HF_TOKEN).")] = None,
    as_json: Json = False,
) -> None:
    """Merge a checkpoint into standalone weights.

    Writes a model for transformers and vLLM, with a model card. The export fails if merged weights and adapter give
    different logprobs for the run's saved prompts.

    \b
    art export runs/mine -o mine-merged --dtype bfloat16      the best evaluated checkpoint; --last: the newest
    art export runs/mine -o mine-gguf --gguf q8_0             one file for llama.cpp and Ollama, with a Modelfile
    """
    from art_cli.models.base_source import find_base
    from art_cli.runs.chain import write_certificate
    from art_cli.runtime.scratch import scratch
    from art_cli.serving import gguf_export, merged_export
    from art_cli.serving.served_model import find_source

    if (gguf is not None) + gguf_adapter + (dtype is not None) > 1:
        raise UsageError("--gguf, --gguf-adapter and --dtype: name one of them")
    if gguf_adapter and max_gap is not None:
        raise UsageError("--max-gap is for merged weights, and --gguf-adapter merges none; leave one of them out")
    token = None
    if push is not None:
        import huggingface_hub

        token = huggingface_hub.get_token()
        if not token:
            raise UsageError("--push: no token for the hub; set HF_TOKEN, or log in with `hf auth login`")
    with scratch("export") as directory:
        if base is not None:
            base = find_base(base, directory=Path.cwd(), built=directory / "base", named="--base")
        source = find_source(named_policy(checkpoint), which=which_checkpoint(is_best, is_last), base=base)
        if source.prompt is not None:
            raise UsageError(f"{checkpoint}: a prompt has no weights to export; its text is in its prompt.json")
        if gguf_adapter:
            file = gguf_export.export_adapter(source, output)
            url = _push(file.parent, push, token)
            text = f"{file}: llama.cpp adds it to a GGUF file of the base: --lora {shlex.quote(str(file))}\n"
            text += f"  pushed to {url}" if url else ""
            print_result({"path": str(file.parent), "file": file.name, "url": url}, text, as_json)
            return
        dtype = gguf or dtype or (source.dtype if source.dtype != "auto" else "float32")
        if gguf is not None:
            exported = gguf_export.export(source, output, kind=gguf, bound=max_gap)
        else:
            exported = merged_export.export(source, output, dtype=dtype, bound=max_gap)
    if (run := source.trained_in) is not None:
        write_certificate(exported.path, run, source.step)
    url = _push(exported.path, push, token)
    text = _as_text(exported, dtype, source.quantize, is_gguf=gguf is not None) + (f"  pushed to {url}" if url else "")
    facts = {**exported._asdict(), "path": str(exported.path), "quantize": source.quantize, "dtype": dtype, "url": url}
    print_result(facts, text, as_json)


def _as_text(exported: "Exported", dtype: str, quantize: str | None, *, is_gguf: bool) -> str:
    path = shlex.quote(str(exported.path))
    use = f"for llama.cpp; Ollama: cd {path} && ollama create NAME" if is_gguf else f"whole model: art serve {path}"
    note = (
        f"  trained on the base in {quantize}, merged into the whole one, which gives other logprobs: "
        f"art eval measures the effect on rewards\n"
    )
    return (
        f"{exported.path}: {dtype}, {use}\n"
        f"  {exported.num_prompts} prompts replayed, {exported.num_tokens} tokens: logprobs differ by at most "
        f"{exported.max_gap:.2e} nats, {exported.mean_gap:.2e} in the mean\n" + (note if quantize else "")
    )


def _push(directory: Path, repo: str | None, token: str | None) -> str | None:
    """Uploads the model (a new repository is private). Returns its URL, or None without `repo`. Raises ArtError."""
    if repo is None or token is None:
        return None
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=token)
    try:
        url = hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=directory, commit_message="art export")
    except Exception as error:  # the hub's client may raise any transport error
        summary = " ".join(str(error).replace(token, "***").split())[:200]
        raise ArtError(f"--push {repo}: {summary}; {directory} is written, push it again by hand") from error
    return str(url)
