"""Finds a base model: a hub id, a directory, or a function or GGUF file from which a directory is built.

Errors from the libraries that load a base become UsageErrors here.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from art_cli.config.sections.model_config import RECORDED, entry_of
from art_cli.models import builtin_models, gguf_base
from art_cli.models.base_files import check_base, gguf_problem
from art_cli.runs.durable import new_directory
from art_cli.runs.manifest import write_hashes
from art_cli.runtime import plugins
from art_cli.runtime.errors import ArtError, RunError, UsageError, is_full_disk, one_line

HUB_TIMEOUT_S = 10.0


def find_base(base: str, *, directory: Path, built: Path, named: str = "model.base") -> str:
    """Returns the hub id or directory from which to load `base`.

    A builder function or GGUF conversion runs once and writes the directory `built`. Raises UsageError if the builder
    is missing or fails, except on a full disk.
    """
    try:
        build = gguf_base.builder_of(base, directory)
        if build is None and (directory / base).is_dir():
            return str((directory / base).resolve())
        if build is None and ":" not in base:
            return base
        base = base if build is not None else entry_of(base)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{named}: {error}") from None
    if os.path.lexists(built) and not built.is_dir():
        raise RunError(f"{built}: not a directory; remove it and the base model is built there again")
    if not built.exists():
        build = build or _builder(base, directory)
        hide_progress_bars()
        try:
            with new_directory(built) as empty:
                build(empty)
                write_hashes(empty)
        except UsageError as error:
            raise UsageError(f"{named}: {error}") from error
        except Exception as error:
            if is_full_disk(error):
                raise
            raise UsageError(f"{named}: {base} failed: {type(error).__name__}: {error}") from error
    return str(built)


def _builder(base: str, directory: Path) -> Callable[[Path], None]:
    module, _, function = base.rpartition(":")
    build: Callable[[Path], None] = (
        getattr(builtin_models, function.replace("-", "_"))
        if module == RECORDED
        else plugins.resolve(base, base=directory)
    )
    return build


def require_base(base: str, named: str | None) -> None:
    """Raises ArtError if the directory has a damaged file or the hub does not have the model."""
    if problem := gguf_problem(Path(base)):
        raise UsageError(f"{named or 'model.base'}: {problem}")
    if Path(base).is_dir():
        check_base(Path(base), named)
    else:
        find_on_hub(base, named)


def find_on_hub(base: str, named: str | None) -> None:
    """Asks the hub once, unless the model is cached, because loading would retry for minutes.

    Raises UsageError if the hub does not have the model, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(base, "config.json"), str):
            return
        huggingface_hub.HfApi().model_info(base, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the boundary to the hub's client: invalid id, unknown model, no network
        summary = " ".join(str(error).split())[:200]
        what = named or f"model.base: {base!r}"
        kinds = "not a directory here" if named else "neither a directory here nor a file.py:function"
        if isinstance(error, HfHubHTTPError | HFValidationError):  # the hub has answered, or the id is invalid
            raise UsageError(f"{what} is {kinds}, and not on the hub: {summary}") from error
        cure = "name a directory" if named else "without it a directory works, and builtin:tiny"
        raise UsageError(f"{what} is {kinds}, and the hub could not be reached ({summary}); {cure}") from error


@contextlib.contextmanager
def loading(base: str, named: str | None) -> Iterator[None]:
    """The boundary to libraries loading a base model: their errors become UsageErrors."""
    try:
        yield
    except ArtError:
        raise
    except Exception as error:
        name = named or f"model.base: cannot load {base!r} (hub id, directory or file.py:function)"
        raise UsageError(
            f"{name}{' cannot be loaded' if named else ''}: {one_line(error)}{_gate(error, base)}"
        ) from error


def _gate(error: BaseException, base: str) -> str:
    """Returns how to get a model whose owner lets only known users have it; "" if the error is another."""
    from huggingface_hub.errors import GatedRepoError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GatedRepoError):
        cause = cause.__cause__ or cause.__context__
    page = f"https://huggingface.co/{base}"
    return "" if cause is None else f" Ask for access at {page}, then set HF_TOKEN or run `hf auth login`"


def hide_progress_bars() -> None:
    """Hides transformers' progress bars, which draw over ours."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
