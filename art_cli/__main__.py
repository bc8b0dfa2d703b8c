"""`python -m art_cli` is `art`: Ctrl-C is quiet from here on, also while modules are imported.

A handler and no `except`: what an import's own code catches, or reports as its failure, would not come here.
"""

import os
import signal


def main() -> None:
    """The console script `art`."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not: ignored, as in a shell's `art &`
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from art_cli import cli

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
