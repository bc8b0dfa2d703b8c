"""Forgeries of a run and of an exported model, each with what `art prove` promises of it.

A forger changes a copy. `resigned` writes the chain anew, and `remade` a manifest, as anybody can who may write to a
run, because neither is signed.
"""

# ruff: noqa: E501  a forgery is a row of a table

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file

from art_cli.runs.chain import (
    CERTIFICATE,
    METRICS,
    NAME,
    Certificate,
    FilePart,
    Link,
    _digest,
    _part,
    read_chain,
    write_certificate,
)
from art_cli.runs.durable import write_lines
from art_cli.runs.manifest import digest_of, hash_files, new_checkpoint, read_manifest
from art_cli.runs.run_dir import RunDir

ADAPTER, LAST = "adapter_model.safetensors", 4
MARK = "mark"  # the file that code of a forged run makes beside the run


class Forgery(NamedTuple):
    """One way to forge. `make` changes a copy of a run of four steps, or of an export."""

    name: str
    number: str  # of the review that found it, or ""
    by: str  # what has to find it: prove, replay, export, digest
    make: Callable[[RunDir], Any]
    is_promised: bool = True


# --- what a forger can do ---------------------------------------------------------------------------------------------


def resigned(run: RunDir, links: list[Link] | None = None) -> None:
    """Writes the chain anew, with the hashes of the files as they are now."""
    links, made = read_chain(run) if links is None else links, list[Link]()
    newest = {name: number for number, link in enumerate(links) for name in link.inputs}
    for number, link in enumerate(links):
        inputs = {name: _now(run, name, part, newest[name] == number) for name, part in link.inputs.items()}
        link = msgspec.structs.replace(link, inputs=inputs, before=made[-1].digest if made else "")
        if link.files and (path := run.checkpoint_path(link.step)).is_dir():
            manifest = read_manifest(path)
            link = msgspec.structs.replace(link, files=manifest.files, origin=manifest.origin, probe=manifest.probe)
        made.append(msgspec.structs.replace(link, digest=_digest(link)))
    write_lines(run.root / NAME, made)


def _now(run: RunDir, name: str, part: FilePart, is_newest: bool) -> FilePart:
    path = run.root / name
    if not path.is_file() or not (is_newest or name == METRICS):
        return part
    if is_newest:
        return _part(path)
    data = path.read_bytes()[: part.size]
    return FilePart(len(data), hashlib.sha256(data).hexdigest())


def remade(run: RunDir, at: int, **fields: Any) -> None:
    """Writes the manifest of a changed checkpoint anew."""
    path = run.checkpoint_path(at)
    manifest, aside = msgspec.structs.replace(read_manifest(path), **fields), path.with_name("aside")
    path.rename(aside)
    with new_checkpoint(path, manifest) as new:
        shutil.copytree(aside, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    shutil.rmtree(aside)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a file of JSON."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_lines(path: Path, change: Callable[[int, Any], Any]) -> None:
    """Changes each line of a file of JSON lines."""
    lines = [change(number, json.loads(line)) for number, line in enumerate(path.read_text().splitlines())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip(run: RunDir, name: str) -> None:
    path = run.root / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"{}\n")


def lines_of(run: RunDir) -> list[bytes]:
    return (run.root / NAME).read_bytes().splitlines(keepends=True)


def cut(run: RunDir, num_links: int) -> None:
    """Removes the first links, the checkpoints before the last one, and the files of the first three steps."""
    (run.root / NAME).write_bytes(b"".join(lines_of(run)[num_links:]))
    for step in range(LAST):
        shutil.rmtree(run.checkpoint_path(step), ignore_errors=True)
    for step in range(3):
        shutil.rmtree(run.trajectories_path(step).parent)


def append(run: RunDir, name: str, *, files: dict[str, str] | None = None, step: int = LAST) -> None:
    """Appends a link that names a file as it is now."""
    links = read_chain(run)
    link = msgspec.structs.replace(links[-1], step=step, files=files or {}, before=links[-1].digest)
    link = msgspec.structs.replace(link, inputs={name: _part(run.root / name)})
    write_lines(run.root / NAME, [*links, msgspec.structs.replace(link, digest=_digest(link))])


def change_groups(run: RunDir) -> None:
    edit_lines(run.scored_path(1), lambda number, line: line | {"reward": 0.25})


def tensors(run: RunDir, change: Callable[[torch.Tensor], torch.Tensor], step: int = LAST, name: str = ADAPTER) -> None:
    """Changes the tensors of a checkpoint, writes its manifest and the chain anew, and keeps the honest probe."""
    path = run.checkpoint_path(step) / name
    save_file({key: change(value).contiguous() for key, value in load_file(path).items()}, path)
    remade(run, step)
    resigned(run)


def other_seed(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(value))
    return torch.randn(value.shape, generator=generator) * value.std()


def adapter_of(run: RunDir, source: int, target: int) -> None:
    shutil.copy(run.checkpoint_path(source) / ADAPTER, run.checkpoint_path(target))
    remade(run, target, probe=read_manifest(run.checkpoint_path(source)).probe)
    resigned(run)


def in_checkpoint(run: RunDir, name: str, change: Callable[[str], str]) -> None:
    path = run.checkpoint_path(LAST) / name
    path.write_text(change(path.read_text()))
    remade(run, LAST)
    resigned(run)


def record(run: RunDir, change: Callable[[Any], Any]) -> None:
    edit(run.config_path, change)
    resigned(run)


def evil(run: RunDir, *keys: str, value: Any = None) -> None:
    """Names code of the run in its record, in a chain that was written anew."""
    code = run.root / "evil.py"
    mark = run.root.parent / MARK
    code.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nraise SystemExit(7)\n")

    def change(config: Any) -> Any:
        section = config
        for key in keys[:-1]:
            section[key] = section.get(key) or {}
            section = section[key]
        section[keys[-1]] = value(f"{code}:run") if value else f"{code}:run"
        return config

    record(run, change)


def groups(run: RunDir, change: Callable[[list[Any]], list[Any]]) -> None:
    path = run.scored_path(0)
    lines = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resigned(run)


def gone_groups(run: RunDir) -> None:
    """Removes the files of a step, and from the chain all that names them."""
    shutil.rmtree(run.trajectories_path(1).parent)
    links = [msgspec.structs.replace(link, inputs={name: part for name, part in link.inputs.items() if "step_0001" not in name})
             for link in read_chain(run)]  # fmt: skip
    resigned(run, links)


def policy_line(run: RunDir) -> str:
    """Appends a line of metrics with another run's digest, and returns the digest."""
    digest = "ab" * 32
    with run.metrics_path.open("a") as file:
        file.write(json.dumps({"step": 3, "split": "train", "metrics": {}, "policy": digest, "time": 0.0}) + "\n")
    return digest


def foreign_manifest(run: RunDir) -> str:
    """Puts a checkpoint of other weights there as a step of its own, and returns its digest."""
    shutil.copytree(run.checkpoint_path(LAST), run.checkpoint_path(9))
    path = run.checkpoint_path(9) / ADAPTER
    save_file({key: -value for key, value in load_file(path).items()}, path)
    remade(run, 9, step=9)
    return digest_of(read_manifest(run.checkpoint_path(9)))


# --- of an export -----------------------------------------------------------------------------------------------------


def export(run: RunDir) -> RunDir:
    """Returns a directory as `art export` leaves it, in the place of the run's copy."""
    home = run.root.with_name("exported")
    shutil.copytree(run.base, home, ignore=shutil.ignore_patterns("hashes.json"))
    write_certificate(home, run, LAST)
    return RunDir(home)


def certificate(home: RunDir, change: Callable[[Certificate], Any]) -> None:
    path = home.root / CERTIFICATE
    found = msgspec.json.decode(path.read_bytes(), type=Certificate)
    change(found)
    found.digest = _digest(found)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


def other_weights(home: RunDir) -> None:
    path = home.root / "model.safetensors"
    save_file({name: -3 * value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def signed_weights(home: RunDir) -> None:
    other_weights(home)
    certificate(home, lambda found: setattr(found, "files", _exported(home)))


def _exported(home: RunDir) -> dict[str, str]:
    return {name: digest for name, digest in hash_files(home.root).items() if name != CERTIFICATE}


def linked(path: Path, *, of: Path | None = None) -> None:
    """Puts a link in the place of a file, to the same bytes elsewhere; or of a directory with a template."""
    aside = path.parent.parent / f"elsewhere-{path.name}"
    if of is None:
        aside.mkdir()
        (aside / "tool_use.jinja").write_text("evil")
    else:
        path.rename(aside)
    path.symlink_to(aside)


def added(run: RunDir, name: str, text: str = "{}") -> None:
    (run.root / name).write_text(text)


def piped(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _first_link(found: Certificate) -> None:
    found.links = found.links[3:]


def swapped(run: RunDir) -> None:
    lines = lines_of(run)
    (run.root / NAME).write_bytes(b"".join([lines[0], lines[2], lines[1], *lines[3:]]))


def _without_hashes(run: RunDir) -> None:
    (run.base / "hashes.json").unlink()
    edit(run.base / "config.json", lambda config: config | {"rms_norm_eps": 0.1})


FORGERIES = [
    *(Forgery(f"a bit of {name}", "", "prove", lambda run, name=name: flip(run, name)) for name in (
        "config.json", "metrics.jsonl", "step_0001/scored.jsonl", "step_0002/eval.jsonl", "step_0003/trajectories.jsonl",
        f"checkpoints/step_0004/{ADAPTER}", "checkpoints/step_0002/manifest.json", "base/config.json", NAME)),
    Forgery("a line added to scored groups", "", "prove", lambda run: longer(run.scored_path(1))),
    Forgery("half of the trajectories", "", "prove", lambda run: os.truncate(run.trajectories_path(0), 999)),
    Forgery("learned.jsonl removed", "", "prove", lambda run: run.learned_path(2).unlink()),
    Forgery("an evaluation added to a step", "", "prove", lambda run: added(run, "step_0001/eval.jsonl")),
    Forgery("a middle link removed", "", "prove", lambda run: (run.root / NAME).write_bytes(b"".join(lines_of(run)[:2] + lines_of(run)[3:]))),
    Forgery("first 3 links, checkpoints, steps removed", "S1", "prove", lambda run: cut(run, 3)),
    Forgery("first 4 links, checkpoints, steps removed", "S1", "prove", lambda run: cut(run, 4)),
    Forgery("two links swapped", "", "prove", swapped),
    Forgery("the last link twice", "", "prove", lambda run: (run.root / NAME).write_bytes(b"".join([*lines_of(run), lines_of(run)[-1]]))),
    Forgery("the last two links removed", "", "prove", lambda run: (run.root / NAME).write_bytes(b"".join(lines_of(run)[:-2]))),
    Forgery("the last link torn", "", "prove", lambda run: os.truncate(run.root / NAME, (run.root / NAME).stat().st_size - 9)),
    Forgery("a field that no version knows in a link", "", "prove", lambda run: (run.root / NAME).write_bytes((run.root / NAME).read_bytes().replace(b'{"schema_version"', b'{"x":1,"schema_version"', 1))),
    Forgery("other groups, named by an appended link", "S2", "prove", lambda run: (change_groups(run), append(run, "step_0001/scored.jsonl"))),
    Forgery("longer groups, named by an appended link", "S2", "prove", lambda run: (longer(run.scored_path(1)), append(run, "step_0001/scored.jsonl"))),
    Forgery("other groups, and step 2 made again", "S2", "prove", lambda run: (change_groups(run), append(run, "step_0001/scored.jsonl", step=2, files=read_manifest(run.checkpoint_path(2)).files))),
    Forgery("other metrics, named by an appended link", "S2", "prove", lambda run: (edit_lines(run.metrics_path, lambda n, line: line | {"metrics": {}}), append(run, METRICS))),
    Forgery("the last evaluation, named by an appended link", "S2", "prove", lambda run: (flip(run, "step_0004/eval.jsonl"), append(run, "step_0004/eval.jsonl"))),
    Forgery("a digest in an appended line of metrics", "S3", "digest", policy_line),
    Forgery("eight digits of it", "S3", "digest", lambda run: policy_line(run)[:8]),
    Forgery("a digest of a checkpoint without a link", "S3", "digest", foreign_manifest),
    Forgery("another step's checkpoint, with a new manifest", "", "prove", lambda run: (shutil.copy(run.checkpoint_path(2) / ADAPTER, run.checkpoint_path(3)), remade(run, 3))),
    Forgery("another probe in a manifest", "", "prove", lambda run: remade(run, 3, probe=read_manifest(run.checkpoint_path(2)).probe)),
    Forgery("another template in a manifest's origin", "", "prove", lambda run: remade(run, 3, origin=msgspec.structs.replace(read_manifest(run.checkpoint_path(3)).origin, template="0" * 64))),
    Forgery("a pipe in the place of groups", "", "prove", lambda run: piped(run.scored_path(1))),
    Forgery("a link in the place of groups, same bytes", "", "prove", lambda run: (run.scored_path(1).rename(run.root.parent / "aside"), run.scored_path(1).symlink_to(run.root.parent / "aside"))),
    Forgery("a linked directory in a checkpoint", "", "prove", lambda run: linked(run.checkpoint_path(4) / "additional_chat_templates")),
    Forgery("a linked directory in the base", "", "prove", lambda run: linked(run.base / "additional_chat_templates")),
    Forgery("the same in a base without hashes.json", "", "prove", lambda run: ((run.base / "hashes.json").unlink(), linked(run.base / "additional_chat_templates"))),
    Forgery("another base without hashes.json", "", "prove", _without_hashes),
    Forgery("another base path in a manifest", "", "prove", lambda run: remade(run, 4, base="/elsewhere"), False),
    Forgery("labels.jsonl of a step", "", "prove", lambda run: added(run, "step_0001/labels.jsonl"), False),
    Forgery("logs/train.log", "", "prove", lambda run: added(run, "logs/train.log", "all is well"), False),
    Forgery("curve.svg", "", "prove", lambda run: added(run, "curve.svg", "<svg/>"), False),
    Forgery("a note in a step", "", "prove", lambda run: added(run, "step_0001/notes.txt"), False),
    Forgery("weights times -3, chain written anew, no replay", "", "prove", lambda run: tensors(run, lambda value: -3 * value), False),
    # the chain is written anew in all of these
    Forgery("last adapter times -3", "C2", "replay", lambda run: tensors(run, lambda value: -3 * value)),
    Forgery("last adapter of another seed", "C2", "replay", lambda run: tensors(run, other_seed)),
    Forgery("adapter of the step before, with its probe", "C2", "replay", lambda run: adapter_of(run, 3, 4)),
    Forgery("adapter of checkpoint 0 at the end", "C2", "replay", lambda run: adapter_of(run, 0, 4)),
    Forgery("an adapter of NaN", "C2", "replay", lambda run: tensors(run, lambda value: value * torch.nan)),
    Forgery("an adapter of NaN in the middle", "C2", "replay", lambda run: tensors(run, lambda value: value * torch.nan, 2)),
    Forgery("an adapter of zeros", "C2", "replay", lambda run: tensors(run, torch.zeros_like)),
    Forgery("the middle adapter times 1.1", "C2", "replay", lambda run: tensors(run, lambda value: value * 1.1, 2)),
    Forgery("checkpoint 0 of another seed", "C2", "replay", lambda run: tensors(run, other_seed, 0)),
    Forgery("checkpoint 0 trained elsewhere", "C2", "replay", lambda run: adapter_of(run, 2, 0)),
    Forgery("lora_alpha times -3", "C2", "replay", lambda run: in_checkpoint(run, "adapter_config.json", lambda text: text.replace('"lora_alpha": 8', '"lora_alpha": -24'))),
    Forgery("another chat template", "C2", "replay", lambda run: in_checkpoint(run, "chat_template.jinja", lambda text: text + "evil")),
    Forgery("another optimizer", "C2", "replay", lambda run: tensors(run, lambda value: 2 * value if value.dim() else value, name="optimizer.safetensors")),
    Forgery("changes that name only a step; all is replayed", "C2", "replay", lambda run: record(run, lambda config: config | {"changes": [{"step": 4}]}), False),
    Forgery("such changes, and the last adapter times -3", "C2", "replay", lambda run: (tensors(run, lambda value: -3 * value), record(run, lambda config: config | {"changes": [{"step": 4}]}))),
    Forgery("changes of a seed", "C2", "replay", lambda run: (tensors(run, other_seed, 0), record(run, lambda config: config | {"changes": [{"step": 4, "key": "train.seed", "old": 7, "new": 0}]}))),
    Forgery("changes of a rate that was another", "C2", "replay", lambda run: record(run, lambda config: config | {"changes": [{"step": 4, "key": "train.learning_rate", "old": 1.0, "new": 0.01}]})),
    Forgery("first checkpoints, links and steps removed", "C2", "replay", lambda run: (cut(run, 4), resigned(run))),
    Forgery("groups of a step removed", "C2", "replay", gone_groups),
    Forgery("other rewards", "", "replay", lambda run: groups(run, lambda lines: [line | {"reward": 1 - line["reward"]} for line in lines])),
    Forgery("one group less", "", "replay", lambda run: groups(run, lambda lines: [line for line in lines if not line["group_id"].endswith("2")])),
    Forgery("one attempt less", "", "replay", lambda run: groups(run, lambda lines: lines[1:])),
    Forgery("another learning rate in the record", "", "replay", lambda run: record(run, lambda config: config | {"train": config["train"] | {"learning_rate": 0.5}})),
    Forgery("code as rollout.scenarios of the record", "C1", "replay", lambda run: evil(run, "rollout", "scenarios")),
    Forgery("code as rollout.entry", "C1", "replay", lambda run: evil(run, "rollout", "entry")),
    Forgery("code as an algorithm", "C1", "replay", lambda run: evil(run, "algorithm", value=lambda code: {"name": "entry", "entry": code})),
    Forgery("code as model.base, and no base", "C1", "replay", lambda run: (shutil.rmtree(run.base), evil(run, "model", "base"))),
    Forgery("code as sft.demos", "C1", "replay", lambda run: evil(run, "sft", value=lambda code: {"demos": code})),
    Forgery("code as scenarios of a source", "C1", "replay", lambda run: evil(run, "rollout", "sources", value=lambda code: {"a": {"scenarios": code}})),
    Forgery("code as eval.scenarios", "C1", "replay", lambda run: evil(run, "eval", "scenarios")),
    Forgery("code as judge", "C1", "replay", lambda run: evil(run, "judge", value=lambda code: {"name": "function", "entry": code})),
    Forgery("code as engine", "C1", "replay", lambda run: evil(run, "engine", value=lambda code: {"name": "entry", "entry": code}), False),
    Forgery("1e-4 of the way of the last adapter", "", "replay", lambda run: tensors(run, lambda value: value * (1 + 1e-4)), False),
    Forgery("another state of the random numbers", "", "replay", lambda run: tensors(run, torch.zeros_like, name="rng.safetensors"), False),
    Forgery("texts of trajectories that were not trained on", "", "replay", lambda run: (flip(run, "step_0001/trajectories.jsonl"), resigned(run)), False),
    Forgery("an evaluation", "", "replay", lambda run: (edit_lines(run.metrics_path, lambda n, line: line | {"metrics": {"reward": 0.999}} if line["split"] == "eval" else line), resigned(run)), False),
    Forgery("weights times -3", "", "export", other_weights),
    Forgery("a file added", "", "export", lambda home: added(home, "adapter_config.json")),
    Forgery("manifest.json added", "", "export", lambda home: added(home, "manifest.json")),
    Forgery("a file removed", "", "export", lambda home: (home.root / "tokenizer.json").unlink()),
    Forgery("a linked directory of templates", "S4", "export", lambda home: linked(home.root / "additional_chat_templates")),
    Forgery("a weight file that is a link, same bytes", "S4", "export", lambda home: linked(home.root / "model.safetensors", of=home.root)),
    Forgery("a pipe", "S4", "export", lambda home: piped(home.root / "generation_config.json")),
    Forgery("the front of its chain cut", "S1", "export", lambda home: certificate(home, _first_link)),
    Forgery("a policy that no link made", "", "export", lambda home: certificate(home, lambda found: setattr(found, "policy", "0" * 64))),
    Forgery("another digest of the certificate", "", "export", lambda home: edit(home.root / CERTIFICATE, lambda found: found | {"digest": "0" * 64})),
    Forgery("weights times -3, certificate written anew", "S5", "export", signed_weights, False),
    Forgery("a hidden file", "", "export", lambda home: added(home, ".note"), False),
]  # fmt: skip


def is_found(forgery: Forgery, honest: RunDir, home: Path, art: Callable[..., int], config: Path) -> bool:
    """Returns whether `art prove` finds the forgery in a copy of the honest run. `art` returns an exit code.

    No code of the forger may have run.
    """
    run = RunDir(shutil.copytree(honest.root, home / honest.root.name, symlinks=True))
    if forgery.by == "export":
        run = export(run)
    made = forgery.make(run)
    words = [str(run.root), *(["--replay", str(config)] if forgery.by == "replay" else [])]
    code = art("prove", *([made, "--runs", str(home)] if forgery.by == "digest" else words))
    assert not (home / MARK).exists(), forgery.name
    return code in (1, 2)
