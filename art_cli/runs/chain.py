"""A run's provenance chain, chain.jsonl. Each checkpoint adds a link with the hashes of its inputs.

    Link(step=0, files={checkpoint files}, inputs={"config.json": ...})
    Link(step=1, files={checkpoint files}, inputs={"step_0000/scored.jsonl": ..., ...}, before=<digest of link 0>)
    ...
    Link(step=9, files={}, inputs={files newer than the last checkpoint})       written when training begins or ends

A link is written once its checkpoint is complete. If the newest checkpoint has no link, or a kill tore the line, the
next start adds the link. Until then the chain ends before this checkpoint, and nothing proves it.

A link names a step's files once they are complete. It also names metrics.jsonl up to its current length. Named bytes
are never overwritten, with two exceptions: config.json may be rewritten, and a step repeated after a loss
gets new files. Changing one byte of a run therefore means rewriting every later link, and that changes the digest of
the newest link. Users can write this digest down elsewhere.
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
GO_ON = "art train writes the link when it continues the run"
METRICS = "metrics.jsonl"  # grows while the run trains
CONFIG = "config.json"
LABELS = "labels.jsonl"  # written by a person, who may continue labeling at any time
READ_BYTES = 2**20
MAX_CERTIFICATE = 256 * 2**20  # bytes; a certificate with a thousand links takes 4 MB


class FilePart(NamedTuple):
    """A file prefix: its length in bytes and its hash. Example: FilePart(8123, "9f3c...")"""

    size: int
    sha256: str


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with its inputs. Paths are relative to the run directory."""

    schema_version: int = SCHEMA_VERSION
    step: int
    before: str = ""  # digest of the previous link; "" in the first
    origin: Origin
    probe: Probe | None = None
    files: dict[str, str]  # the checkpoint's files, copied from the manifest; empty when a link has no checkpoint
    inputs: dict[str, FilePart]  # files that the training step read, and files written in the meantime
    digest: str = ""  # sha256 of this link with an empty `digest`

    @property
    def policy(self) -> str:
        """The policy digest that the checkpoint's replies carry ("" for a link without a checkpoint)."""
        return policy_digest(self.origin, self.files) if self.files else ""


def is_evaluated(run: RunDir, step: int, digest: str) -> bool:
    """Returns whether a step's policy was evaluated. An evaluation of a lost, repeated step does not count."""
    done = [line.policy for line in run.metrics() if (line.split, line.step) == ("eval", step)]
    return bool(done) and (not done[-1] or digest in ("", done[-1]))


class Flaw(NamedTuple):
    """A place where a run differs from its chain. Example: Flaw("step_0003/scored.jsonl", "was changed")"""

    place: str
    what: str


def read_chain(run: RunDir) -> list[Link]:
    """Returns the links, oldest first; none for older runs. Raises DataError if the file is damaged."""
    return list(run.lines(run.root / NAME, Link))


def add_link(run: RunDir, manifest: Manifest, *, rest: int | None = None) -> None:
    """Writes the newest checkpoint's link, or with `rest` one that names new records of steps before `rest`."""
    links = read_chain(run)
    if manifest.origin is None:
        return
    if not any((link.step, link.files) == (manifest.step, manifest.files) for link in links):
        links.append(_write(run, links, manifest, _new_parts(run, links, manifest.step), manifest.files))
    if rest is not None and (inputs := _new_parts(run, links, rest)):
        _write(run, links, manifest, inputs, {})


def _new_parts(run: RunDir, links: list[Link], until: int) -> dict[str, FilePart]:
    """Returns records and files of steps before `until` whose current content no link names."""
    known = {name: part for link in links for name, part in link.inputs.items()}
    first = min(links[-1].step, until - 1) if links else 0  # a repeated step may already have a link
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
    """Yields each link, input and checkpoint that differs from the chain. Reads every byte."""
    yield from broken_links(links)
    known = iter(links)
    for number, _, line in json_lines.lines(run.root / NAME, within=run.root):
        link = next(known, None)
        if link is None and json_lines.is_torn(line):
            yield Flaw(f"{NAME}:{number}", f"is torn, so nothing proves what it named; {GO_ON}")
        # unknown fields also count as a change
        elif link is not None and line.rstrip(b"\n") != msgspec.json.encode(link):
            yield Flaw(f"{NAME}:{number}", "is not written as it was")
    parts = _named(links)[0]
    for name, its in parts.items():  # earlier parts are prefixes of the last part
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
            if manifest.origin is not None:  # imported checkpoints have no origin
                yield Flaw(place, f"has no link, so nothing proves it; {GO_ON}")
        elif manifest.files != of_step[step].files:
            names = dict(manifest.files.items() ^ of_step[step].files.items())
            yield Flaw(f"{place}/{min(names)}", "is not the one that the step made")
        elif (manifest.origin, manifest.probe) != (of_step[step].origin, of_step[step].probe):
            yield Flaw(f"{place}/{MANIFEST}", "has another origin or probe than its link")


def broken_links(links: list[Link]) -> list[Flaw]:
    """Returns each link that was changed, does not follow the previous link, or renames a file that must not change."""
    changed = [number for number, link in enumerate(links, 1) if link.digest != _digest(link)]
    digests = ["", *(link.digest for link in links)]
    torn = [number for number, link in enumerate(links, 1) if link.before != digests[number - 1]]
    flaws = [Flaw(f"{NAME}:{number}", "was changed") for number in changed]
    flaws += [Flaw(f"{NAME}:{number}", "does not follow the link before it") for number in torn]
    return flaws + _named(links)[1]


def _named(links: list[Link]) -> tuple[dict[str, list[FilePart]], list[Flaw]]:
    """Returns each file's parts, oldest first, and a flaw for each link that names a fixed file again.

    A step's file becomes fixed once a checkpoint uses it, unless the step repeats. Before that it may grow.
    metrics.jsonl may always grow.
    """
    parts, flaws, free, made = dict[str, list[FilePart]](), list[Flaw](), set[str](), -1
    for number, link in enumerate(links, 1):
        if link.files and link.step <= made:  # the first checkpoint of this step was lost
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
    """Returns the link of each step that currently has a policy. Repeating a step drops the links of later steps."""
    made = dict[int, Link]()
    for link in links:
        if link.files and made and link.step <= next(reversed(made)):
            made = {step: each for step, each in made.items() if step < link.step}
        made |= {link.step: link} if link.files else {}
    return made


def _digest(record: "Link | Certificate") -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(record, digest=""))).hexdigest()


def _written(run: RunDir, numbers: Iterable[int]) -> list[str]:
    """Returns the run's records and the files of the given steps."""
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
    """Compares a file's first bytes with a part; returns the difference, or "". `is_last`: the file must end there."""
    hashed, left = hashlib.sha256(), part.size
    try:
        with open_file(path, within=within) as file:
            while left > 0 and (data := file.read(min(left, READ_BYTES))):
                hashed.update(data)
                left -= len(data)
            if left == 0 and is_last and path.name != METRICS and file.read(1):
                return f"has more than {part.size} bytes"
    except (OSError, ValueError) as error:  # a chain may name any path
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if left > 0:
        return f"has {part.size - left} bytes instead of {part.size}"
    return "" if hashed.hexdigest() == part.sha256 else "was changed"


# --- certificates of exported models -------------------------------------------------------------------------------


class Certificate(msgspec.Struct, kw_only=True):
    """certificate.json in an exported model: the chain up to its checkpoint and hashes of the exported files."""

    schema_version: int = SCHEMA_VERSION
    policy: str  # digest of the checkpoint that was exported
    links: list[Link]
    files: dict[str, str]  # path in the export -> sha256
    digest: str = ""  # sha256 of this certificate with an empty `digest`


def write_certificate(export: Path, run: RunDir, step: int) -> None:
    """Writes the certificate of a model exported from a run's step. Runs without a chain get no certificate."""
    links = read_chain(run)
    made = [place for place, link in enumerate(links) if link.files and link.step == step]
    if made:  # a repeated step has several links; the newest counts
        after = (place for place in range(made[-1] + 1, len(links)) if links[place].files)
        certificate = Certificate(
            policy=links[made[-1]].policy, links=links[: next(after, len(links))], files=hash_files(export)
        )
        certificate.digest = _digest(certificate)
        write_file(export / CERTIFICATE, msgspec.json.format(msgspec.json.encode(certificate)))


def check_certificate(export: Path) -> tuple[Certificate, list[Flaw]]:
    """Returns an exported model's certificate and all differences from it. Raises DataError if the file is damaged."""
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
