"""The judge's system prompt: instructions with a rubric in their place, packaged or the user's own text files."""

from pathlib import Path

from art_cli.config.schema import RulerJudgeConfig
from art_cli.errors import UsageError

PLACE = "{rubric}"


def read_instructions(config: RulerJudgeConfig, directory: Path, *, rubric: str | None = None) -> str:
    """The system prompt; `rubric` is one as text, in place of any file.

    Raises UsageError: a file that cannot be read or is empty, a rubric without a place.
    """
    instructions = _read_text("instructions", config.instructions, directory)
    if PLACE not in instructions:
        if config.rubric is not None or rubric is not None:
            raise UsageError(f"judge.rubric: {config.instructions} has no {PLACE} to put it in; add one")
        return instructions
    return instructions.replace(PLACE, rubric or _read_text("rubric", config.rubric, directory))


def _read_text(what: str, path: Path | None, directory: Path) -> str:
    if path is None:
        return (Path(__file__).parent / f"{what}.txt").read_text(encoding="utf-8").strip()
    path = directory / path.expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"judge.{what}: {path}: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise UsageError(f"judge.{what}: {path}: the file is empty")
    return text
