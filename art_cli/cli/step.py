"""`art step`: one policy update from scored trajectories."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from art_cli.cli import Checkpoint, Config, Json, NewCheckpoint, Overrides, print_result
from art_cli.runtime.errors import DataError, printable

if TYPE_CHECKING:
    from art_cli.runs.trajectory import ScoredTrajectory

log = logging.getLogger(__name__)


def run(
    config: Config,
    scored: Annotated[Path, Argument(metavar="SCORED", help="Scored trajectories.", show_default=False)],
    output: NewCheckpoint,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
) -> None:
    """Take one policy update from a file.

    Writes the same checkpoint as `art train` after these trajectories. If --checkpoint is a run, starts from the
    checkpoint that sampled the attempts. Incomplete groups are named and left out. Exit code 1, without a checkpoint,
    if no attempt has tokens, all failed, or no group has signal.

    \b
    art step config.yaml scored.jsonl -o step_0001
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.owed_groups import group
    from art_cli.loop.stages import take_step

    loaded = load_config(config, overrides or [])
    trajectories = _read(scored)
    taken = take_step(loaded, trajectories, output, checkpoint=checkpoint)
    lines = [f"{output}: step {taken.step} from {len(group(trajectories))} groups"]
    lines += [f"  {printable(name)} {value:.6g}" for name, value in taken.metrics.items()]
    result = {"checkpoint": str(output), "step": taken.step, "metrics": taken.metrics}
    print_result(result, "\n".join(lines), as_json)


def _read(path: Path) -> "list[ScoredTrajectory]":
    """Returns the trajectories of the complete groups, and warns of the others."""
    from art_cli.loop.owed_groups import group
    from art_cli.runs.durable import read_numbered
    from art_cli.runs.json_lines import require_file
    from art_cli.runs.trajectory import ScoredTrajectory, by_group

    require_file(path)
    scored, first = [], dict[str, tuple[str, int]]()  # each claim of a line -> its value and the first line with it
    for line, each in read_numbered(path, ScoredTrajectory):
        group_id, index, size = each.group_id, each.index, each.group_size
        if not 0 <= index < size:
            raise DataError(f"index {index} is not in a group of {size}; indexes begin at 0", path, line)
        claims = {
            f"the group_size of {group_id!r}": f"{size}",
            f"index {index} of group {group_id!r}": f"id {each.id!r}",
            f"id {each.id!r}": f"index {index} of group {group_id!r}",
        }
        for claim, value in claims.items():
            before, number = first.setdefault(claim, (value, line))
            if before != value:
                message = printable(f"{claim} is {value}, but {before} in line {number}", limit=400)
                raise DataError(f"{message}; give every attempt its own id and index", path, line)
        scored.append(each)
    if not scored:
        raise DataError("no scored trajectories: nothing to learn from", path)
    whole = group(scored)
    for name, members in by_group(scored).items():
        if name not in whole:
            num, size = len(members), members[0].group_size
            log.warning("%s: group %s is left out, because it has %d of %d attempts", path, printable(name), num, size)
    return scored
