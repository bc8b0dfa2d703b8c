"""Prints why environments are refused, and which tasksets are listed. It runs in verifiers' own Python."""

import json
import sys

START, CASES, PLACE = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sys.path.insert(0, START)
import bootstrap  # noqa: E402

sys.path.pop(0)
bootstrap.load_package()
from art_cli.rollouts.environments import Settings, open_environment  # noqa: E402
from art_cli.rollouts.environments.listing import look  # noqa: E402
from art_cli.runtime.errors import UsageError  # noqa: E402

told = []
for name, args, num_seeds in CASES:
    try:
        open_environment(Settings(f"verifiers/{name}", args, directory=PLACE, num_seeds=num_seeds))
        told.append("")
    except UsageError as refusal:
        told.append(str(refusal))
print("\n" + json.dumps([told, look("verifiers")]))
