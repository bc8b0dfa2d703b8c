"""OpenEnv's own check of an endpoint, before it would capture an agent's calls there: prints its report.

    python openenv_validate.py http://127.0.0.1:8000/v1 MODEL KEY

The packages above the check are not run, because they import OpenEnv's servers, and with those FastMCP and gradio.
"""

import importlib.util
import json
import sys
import types
from dataclasses import asdict

for name in ("openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
    package = types.ModuleType(name)
    (root,) = importlib.util.find_spec("openenv").submodule_search_locations
    package.__path__ = [f"{root}/{name.removeprefix('openenv.').replace('.', '/')}"]
    sys.modules[name] = package

from openenv.core.harness.capture.validate_llm import validate_llm  # noqa: E402

url, model, key = sys.argv[1:]
print(json.dumps(asdict(validate_llm(url, model, api_key=key, provider="vllm"))))
