"""Starts a worker process in any Python: `bootstrap.py SOCKET MODULE [PATH]`; called by process.py.

MODULE is the module in this package whose `main` answers calls at SOCKET. The Python may be the user's own
(`rollout.python`), without this package and its dependencies. The package is therefore loaded from this file's
directory, and neighboring packages do not become importable. The worker modules (process_worker.py,
cluster/ray_driver.py, and their imports) need only the standard library, and Ray's driver also needs Ray. PATH is the
parent's `sys.path` as a JSON list, passed if both processes use the same Python.

Python versions that are too old can still run this file, which then reports the problem.
"""

import importlib
import importlib.util
import json
import os
import sys

OLDEST = (3, 11)
FIRST_ID = 1  # id of the first call (runtime/processes/process_calls.py)
HERE = os.path.dirname(os.path.realpath(__file__))
PACKAGE = os.path.dirname(HERE)


def main() -> None:
    if sys.version_info < OLDEST:
        message = f"it is Python {sys.version.split()[0]}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed"
        raised = {"type": "Raised", "id": FIRST_ID, "kind": "UsageError", "message": message}
        os.write(int(sys.argv[1]), json.dumps(raised).encode() + b"\n")
        return
    if len(sys.argv) > 3:
        sys.path[:] = json.loads(sys.argv.pop())
    else:  # Python puts this file's directory first, which would make our modules importable by bare names
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != HERE]
    load_package()
    importlib.import_module(f"art_cli.rollouts.{sys.argv[2]}").main()


def load_package() -> None:
    """Makes `art_cli` importable, without neighboring packages."""
    initial = os.path.join(PACKAGE, "__init__.py")
    spec = importlib.util.spec_from_file_location("art_cli", initial, submodule_search_locations=[PACKAGE])
    assert spec and spec.loader, initial
    module = importlib.util.module_from_spec(spec)
    sys.modules["art_cli"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that the user's code started with multiprocessing
    load_package()
