"""The model card of an export: its base, run and step, its evaluation, its checks. Markdown, for the hub."""

import json
from collections.abc import Mapping
from pathlib import Path

from art_cli.serving.served_model import Source


def model_card(source: Source, *, evaluation: Mapping[str, float], checks: Mapping[str, object]) -> str:
    """Returns the card's text. `evaluation` has the means at that step, if any; `checks` what the export measured.

    It shows only the last name of a local directory, not its path.
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
