"""`python -m art_cli` is `art`: set-up that must precede imports.

Ctrl-C exits without a traceback, also during imports. This requires a signal handler, because imported code may catch
KeyboardInterrupt or report it as an import error.

Idle OpenMP threads sleep early. GNU's OpenMP reads its environment when torch is loaded.
"""

import os
import signal

# Polls by an idle OpenMP thread before it sleeps. GNU's default, 300,000 polls, blocks a core for about 14 ms, which on
# a busy machine made a small model's step 4 times slower. 1,000 polls cost nothing on an idle machine
# (python -m benchmarks.speed.busy, benchmarks/results/LOG.md).
SPIN_COUNT = "1000"


def main() -> None:
    """The console script `art`."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    is_default = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # False if ignored, for example in `art &`
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from art_cli.cli import app

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
