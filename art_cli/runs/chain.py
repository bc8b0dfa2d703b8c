"""The chain of a run, chain.jsonl: a link for each checkpoint, which names by hashes all that it was made from.

    Link(step=0, files={its checkpoint}, inputs={"config.json": ...})
    Link(step=1, files={its checkpoint}, inputs={"step_0000/scored.jsonl": ..., ...}, before=<digest of the link of 0>)
    ...
    Link(step=9, files={}, inputs={all that came after the last checkpoint})          when a training begins or ends

A link is written when its checkpoint is whole; a start that finds the newest checkpoint without one adds it, also where
a kill has torn the line. Until then nothing proves that checkpoint, and the chain ends before it. The files of a step
are named once they are complete, and metrics.jsonl as far as it goes then; later bytes replace none that a link named.
Two things differ: config.json is written anew, and a step that is done again after a loss has new files. So whoever
changes a byte of a run has to write all links from there on anew or once more. The digest of the newest link, which one
can write down elsewhere, is another then.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.runs import json_lines
from art_cli.runs.durable import LineWriter, write_file
from art_cli.runs.json_lines import open_file, read_file
from art_cli.runs.manifest import (
    MANIFEST,
    STEP_NAME,
    Manifest,
    Origin,
    Probe,
    hash_file,
    hash_files,
    odd_files,
    policy_digest,
    verify_built,
    verify_checkpoint,
)
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import SCHEMA_VERSION
from art_cli.runtime.errors import CheckpointError, DataError, one_line

NAME, CERTIFICATE = "chain.jsonl", "certificate.json"
GO_ON = "art train writes the link when it goes on with the run"
CONFIG, METRICS = "config.json", "metrics.jsonl"  # grows while the run goes on
LABELS = "labels.jsonl"  # a person's, who may go on labelling
READ_BYTES = 2**20
MAX_CERTIFICATE = 256 * 2**20  # bytes; a thousand links have 4 MB


class FilePart(NamedTuple):
    """The first bytes of a file. Example: FilePart(8123, "9f3c...")"""

    size: int
    sha256: str


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, and what it was made from. Paths are those below the run's directory."""

    schema_version: int = SCHEMA_VERSION
    step: int
    before: str = ""  # digest of the link before; "" in the first
    origin: Origin
    probe: Probe | None = None
    files: dict[str, str]  # the checkpoint's files, as in its manifest; empty: what came after it
    inputs: dict[str, FilePart]  # the files it was made from, and those that the run had written beside it
    digest: str = ""  # sha256 of this link without its digest

    @property
    def policy(self) -> str:
        """The digest that replies of the checkpoint carry; "" for a link without one."""
        return policy_digest(self.origin, self.files) if self.files else ""


def is_evaluated(run: RunDir, step: int, digest: str) -> bool:
    """Returns whether the policy of a step has an evaluation; that of a lost policy, which was made again, is none."""
    done = [line.policy for line in run.metrics() if (line.split, line.step) == ("eval", step)]
    return bool(done) and (not done[-1] or digest in ("", done[-1]))


class Flaw(NamedTuple):
    """One place where a run is not what its chain says. Example: Flaw("step_0003/scored.jsonl", "was changed")"""

    place: str
    what: str


def read_chain(run: RunDir) -> list[Link]:
    """Returns the links, oldest first; none for a run of a version that wrote none. Raises DataError: damaged."""
    return list(run.lines(run.root / NAME, Link))


def add_link(run: RunDir, manifest: Manifest, *, rest: int | None = None) -> None:
    """Writes the link of the newest checkpoint, if it has none.

    With `rest` also one without a checkpoint of what is new beside it: records, and files of steps before `rest`.
    """
    links = read_chain(run)
    if manifest.origin is None:
        return
    if not any((link.step, link.files) == (manifest.step, manifest.files) for link in links):
        links.append(_write(run, links, manifest, _new_parts(run, links, manifest.step), manifest.files))
    if rest is not None and (inputs := _new_parts(run, links, rest)):
        _write(run, links, manifest, inputs, {})


def _new_parts(run: RunDir, links: list[Link], until: int) -> dict[str, FilePart]:
    """Returns the files that no link names as they are now, of the records and the steps before `until`."""
    known = {name: part for link in links for name, part in link.inputs.items()}
    first = min(links[-1].step, until - 1) if links else 0  # a step that was done again may have a link already
    written = _written(run, range(first, until))
    return {name: part for name in written if (part := _part(run.root / name)) != known.get(name)}


def _write(
    run: RunDir, links: list[Link], manifest: Manifest, inputs: dict[str, FilePart], files: dict[str, str]
) -> Link:
    assert manifest.origin is not None
    before = links[-1].digest if links else ""
    link = Link(
        step=manifest.step, before=before, origin=manifest.origin, probe=manifest.probe, files=files, inputs=inputs
    )
    link = msgspec.structs.replace(link, digest=_digest(link))
    with LineWriter(run.root / NAME) as writer:
        writer.append(link)
    return link


def find_flaws(run: RunDir, links: list[Link]) -> Iterator[Flaw]:
    """Yields each place where links, inputs or checkpoints are not what the chain says. Every byte is read."""
    yield from broken_links(links)
    known = iter(links)
    for number, _, line in json_lines.lines(run.root / NAME, within=run.root):
        link = next(known, None)
        if link is None and json_lines.is_torn(line):
            yield Flaw(f"{NAME}:{number}", f"is torn, so that nothing proves what it named; {GO_ON}")
        elif link is not None and line.rstrip(b"\n") != msgspec.json.encode(link):  # also a field that no version knows
            yield Flaw(f"{NAME}:{number}", "is not written as it was")
    parts = _named(links)[0]
    for name, its in parts.items():  # earlier ones are the beginnings of the last
        if found := [flaw for part in its if (flaw := _flaw(run.root / name, part, run.root, part is its[-1]))]:
            yield Flaw(name, found[0])
    of_step, there = made_by(links), sorted(_step_of(path.name) for path in run.root.glob("step_*"))
    for name in _written(run, (step for step in there if 0 <= step < max(of_step, default=0))):
        if name not in parts and name.endswith((".json", ".jsonl")):
            yield Flaw(name, "no link names it")
    yield from (Flaw(f"base/{name}", "is a link, or no file") for name in odd_files(run.base))
    try:
        verify_built(run.base)
    except CheckpointError as error:
        yield Flaw("base", str(error).removeprefix(f"{run.base}: "))
    for step in run.checkpoint_steps():
        path = run.checkpoint_path(step)
        place = str(path.relative_to(run.root))
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            if path.is_dir():  # it may have been pruned meanwhile
                yield Flaw(place, str(error).removeprefix(f"{path}: "))
            continue
        if step not in of_step:  # a run that trains may have added it meanwhile
            of_step |= made_by(read_chain(run))
        if step not in of_step:
            if manifest.origin is not None:  # an imported one has none
                yield Flaw(place, f"has no link, so that nothing proves it; {GO_ON}")
        elif manifest.files != of_step[step].files:
            names = dict(manifest.files.items() ^ of_step[step].files.items())
            yield Flaw(f"{place}/{min(names)}", "is not the one that the step made")
        elif (manifest.origin, manifest.probe) != (of_step[step].origin, of_step[step].probe):
            yield Flaw(f"{place}/{MANIFEST}", "has another origin or probe than its link")


def broken_links(links: list[Link]) -> list[Flaw]:
    """Returns each link that was changed, does not follow the one before it, or replaces what an earlier one named."""
    changed = [number for number, link in enumerate(links, 1) if link.digest != _digest(link)]
    digests = ["", *(link.digest for link in links)]
    torn = [number for number, link in enumerate(links, 1) if link.before != digests[number - 1]]
    flaws = [Flaw(f"{NAME}:{number}", "was changed") for number in changed]
    flaws += [Flaw(f"{NAME}:{number}", "does not follow the link before it") for number in torn]
    return flaws + _named(links)[1]


def _named(links: list[Link]) -> tuple[dict[str, list[FilePart]], list[Flaw]]:
    """Returns for each file the parts that links name, oldest first, and each link that names one once too often.

    A file of a step is fixed once a checkpoint was made from it, unless the step was done again. Until then it may
    grow, as the metrics may always.
    """
    parts, flaws, free, made = dict[str, list[FilePart]](), list[Flaw](), set[str](), -1
    for number, link in enumerate(links, 1):
        if link.files and link.step <= made:  # its first checkpoint was lost
            free |= {name for name in parts if _step_of(name) >= link.step - 1}
        for name, part in link.inputs.items():
            if name in free or name == CONFIG:
                parts[name] = []
            elif name in parts and name != METRICS and _step_of(name) < made:
                flaws.append(Flaw(f"{NAME}:{number}", f"names {name} again, from which step {made} was made"))
            free.discard(name)
            parts.setdefault(name, []).append(part)
        made = link.step if link.files else made
    return parts, flaws


def _step_of(name: str) -> int:
    found = STEP_NAME.fullmatch(name.partition("/")[0])
    return int(found[1]) if found else -1


def made_by(links: Iterable[Link]) -> dict[int, Link]:
    """Returns the link of each step that has a policy now. A step that is done again takes the later ones with it."""
    made = dict[int, Link]()
    for link in links:
        if link.files and made and link.step <= next(reversed(made)):
            made = {step: each for step, each in made.items() if step < link.step}
        made |= {link.step: link} if link.files else {}
    return made


def _digest(record: "Link | Certificate") -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(record, digest=""))).hexdigest()


def _written(run: RunDir, numbers: Iterable[int]) -> list[str]:
    """Returns the files that the run has written: its records, and those of these steps."""
    steps = [path for step in numbers for path in sorted(run.trajectories_path(step).parent.glob("*.json*"))
             if path.name != LABELS]  # fmt: skip
    records = [path for path in (run.config_path, run.metrics_path) if path.is_file()]
    return [str(path.relative_to(run.root)) for path in (*records, *steps)]


def _part(path: Path) -> FilePart:
    if path.name != METRICS:
        return FilePart(path.stat().st_size, hash_file(path))
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1]  # a kill may have torn the last line
    return FilePart(len(lines), hashlib.sha256(lines).hexdigest())


def _flaw(path: Path, part: FilePart, within: Path, is_last: bool) -> str:
    """Returns what is wrong with the first bytes of a file, or "" if they are those of the part, its last or not."""
    hashed, left = hashlib.sha256(), part.size
    try:
        with open_file(path, within=within) as file:
            while left > 0 and (data := file.read(min(left, READ_BYTES))):
                hashed.update(data)
                left -= len(data)
            if left == 0 and is_last and path.name != METRICS and file.read(1):
                return f"has more than {part.size} bytes"
    except (OSError, ValueError) as error:  # a chain may name anything
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if left > 0:
        return f"has {part.size - left} bytes instead of {part.size}"
    return "" if hashed.hexdigest() == part.sha256 else "was changed"


# --- handed on with a model -------------------------------------------------------------------------------------------


class Certificate(msgspec.Struct, kw_only=True):
    """certificate.json beside an exported model: the chain up to its checkpoint, and hashes of the exported files."""

    schema_version: int = SCHEMA_VERSION
    policy: str  # digest of the checkpoint that was exported
    links: list[Link]
    files: dict[str, str]  # path in the export -> sha256
    digest: str = ""  # sha256 of this certificate without its digest


def write_certificate(export: Path, run: RunDir, step: int) -> None:
    """Writes the certificate of a model that was exported from a run's step; nothing for a run without a chain."""
    links = read_chain(run)
    made = [place for place, link in enumerate(links) if link.files and link.step == step]
    if made:  # the last one, where the step was done again
        after = (place for place in range(made[-1] + 1, len(links)) if links[place].files)
        certificate = Certificate(
            policy=links[made[-1]].policy, links=links[: next(after, len(links))], files=hash_files(export)
        )
        certificate.digest = _digest(certificate)
        write_file(export / CERTIFICATE, msgspec.json.format(msgspec.json.encode(certificate)))


def check_certificate(export: Path) -> tuple[Certificate, list[Flaw]]:
    """Returns the certificate of an exported model, and what is not as it says. Raises DataError: damaged."""
    path = export / CERTIFICATE
    try:
        data = read_file(path, max_bytes=MAX_CERTIFICATE)
        certificate = msgspec.json.decode(data, type=Certificate)
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"not a certificate: {one_line(error)}", path) from error
    flaws = broken_links(certificate.links)
    if certificate.digest != _digest(certificate) or data != msgspec.json.format(msgspec.json.encode(certificate)):
        flaws.append(Flaw(CERTIFICATE, "was changed"))
    if certificate.policy not in [link.policy for link in certificate.links]:
        flaws.append(Flaw(CERTIFICATE, "no link of its chain made the exported policy"))
    found = hash_files(export)
    names = sorted(name for name in certificate.files if found.get(name) != certificate.files[name])
    flaws += [Flaw(name, "is not the exported file") for name in names]
    flaws += [Flaw(name, "is a link, or no file") for name in odd_files(export)]
    there = {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file()}
    added = sorted(name for name in there - certificate.files.keys() - {CERTIFICATE} if not name.startswith("."))
    return certificate, [*flaws, *(Flaw(name, "was added to the export") for name in added)]
