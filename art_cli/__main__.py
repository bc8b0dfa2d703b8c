"""`python -m art_cli` is `art`: what has to be settled before anything is imported.

Ctrl-C is quiet from here on, also while modules are imported. That takes a handler and no `except`, because what an
import's own code catches, or reports as its failure, would not come here.

Threads that compute wait politely. GNU's OpenMP reads its environment when torch is loaded.
"""

import os
import signal

# How often an idle OpenMP thread looks for work before it sleeps. GNU's default of 300,000 takes about 14 ms, for which
# a thread that waits for another one holds its core; beside busy processes that made a small model's step 4 times as
# slow. A thousand looks cost nothing on an idle machine (python -m benchmarks.speed.busy, benchmarks/results/LOG.md).
SPIN_COUNT = "1000"


def main() -> None:
    """The console script `art`."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not: ignored, as in a shell's `art &`
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from art_cli.cli import app

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
