"""An adapter's adapter_config.json. It may come from a stranger, so it is checked before peft acts on it."""

import json
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from art_cli.models.saved_weights import fitting, weights_file
from art_cli.runs.durable import read_object

# Settings of LoRA variants that change the base or the forward pass in ways that the engines do not know.
UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
PATTERNS_S = 20.0  # longest search with all patterns; the largest models take about a second
# Searches like peft does, but in a process that can be ended: `re` has no deadline.
_SEARCH = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
forms = ("{}", r"(.*\.)?({})$", r"(^|.*\.){}($|\..*)", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
for pattern in patterns:
    for form in forms:
        try:
            search = re.compile(form.replace("{}", pattern))
        except re.error:
            continue  # peft reports it
        for name in names:
            search.fullmatch(name) if form == "{}" else search.match(name)
"""


def read_lora(adapter: Path) -> Any:
    """Returns the LoRA configuration in an adapter's directory, with ranks that its tensors have.

    Raises CheckpointError for other adapters, unsupported settings, and missing weights.
    """
    import peft
    from safetensors import safe_open

    path, weights = adapter / "adapter_config.json", weights_file(adapter, has_adapter=True)
    with fitting(path):
        kind = read_object(path).get("peft_type")
        if kind != "LORA":  # other types load further models
            raise ValueError(f"its peft_type is {kind!r}; only LORA is supported")
        config: Any = peft.PeftConfig.from_pretrained(str(adapter))
        if found := [name for name in UNSUPPORTED if getattr(config, name, None)]:
            raise ValueError(f"{found[0]} is not supported")
        config.rank_pattern, config.alpha_pattern = config.rank_pattern or {}, config.alpha_pattern or {}
        with safe_open(weights, framework="np") as file:
            names: list[str] = file.keys()
            shapes = [file.get_slice(name).get_shape() for name in names if "lora_" in name and "_A" in name]
        most = max((shape[0] for shape in shapes if shape), default=0)
        for rank in (config.r, *config.rank_pattern.values()):
            if type(rank) is not int or not 1 <= rank <= most:  # a rank without tensors would only take memory
                raise ValueError(f"rank {rank!r}; the largest in {weights.name} is {most}")
    return config


def check_patterns(config: Any, names: Iterable[str]) -> None:
    """Raises ValueError if the configuration's regular expressions take too long on the modules' names."""
    single = (config.target_modules, config.exclude_modules, config.layers_pattern)
    lists = (each for each in (config.modules_to_save, config.layers_pattern) if isinstance(each, list))
    several = (*config.rank_pattern, *config.alpha_pattern, *chain.from_iterable(lists))
    patterns = [each for each in (*single, *several) if isinstance(each, str)]
    if not patterns:
        return
    asked = json.dumps([patterns, list(names)])
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", _SEARCH], input=asked, text=True, timeout=PATTERNS_S, capture_output=True
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"its patterns of module names take more than {PATTERNS_S:g} s to match") from None
