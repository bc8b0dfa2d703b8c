"""`art` in this process, and at its end what torch took of the GPU: the learner's memory, apart from the engine's.

python -m benchmarks.gpu.art_train MEMORY.json train config.yaml ...
"""

import atexit
import json
import sys
from pathlib import Path


def main() -> None:
    path = Path(sys.argv.pop(1))
    atexit.register(_write, path)
    from art_cli.__main__ import main as art

    art()


def _write(path: Path) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    figures = {"learner_gb": torch.cuda.max_memory_allocated() / 1e9, "held_gb": held / 1e9, "kept_gb": kept / 1e9}
    path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
