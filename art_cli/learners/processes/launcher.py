"""Runs torchrun, and saves its processes' exit statuses to a file if one of them dies: `launcher FILE ARGUMENTS`.

The file is a JSON list of [rank, exit status] (negative for signals), in the order in which torchrun noticed the
deaths.
"""

import json
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> None:
    try:
        run(parse_args(sys.argv[2:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        deaths = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
        Path(sys.argv[1]).write_text(json.dumps([(rank, failure.exitcode) for rank, failure in deaths]))
        raise


if __name__ == "__main__":
    main()
