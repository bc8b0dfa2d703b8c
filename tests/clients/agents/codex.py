"""Codex's command line as a rollout.command: it answers a question about a file, which takes a command of the shell.

    rollout: {command: [python, codex.py, /path/to/codex]}

It keeps nothing: what it writes and where it would find a login is a directory that is removed again.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTION, ANSWER = "How many lines has data.txt?", "It has 3 lines."
# Without these it would ask the network for news, plug-ins and its own model's tools.
OFFLINE = (
    "analytics.enabled=false",
    "check_for_update_on_startup=false",
    "features.apps=false",
    "features.plugins=false",
)


def main(program: str) -> None:
    sys.stdin.readline()  # the scenario, which has nothing but its id
    url, model = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_MODEL"]
    provider = f'{{name="art", base_url="{url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = [f"model_providers.art={provider}", "model_provider=art", "web_search=disabled", *OFFLINE]
    command = [program, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", model]
    command += [part for setting in settings for part in ("-c", setting)]
    with tempfile.TemporaryDirectory(prefix="codex-") as place:
        home, work, last = Path(place, "home"), Path(place, "work"), Path(place, "last.txt")
        home.mkdir()
        work.mkdir()
        (work / "data.txt").write_text("a\nb\nc\n")
        command += ["--cd", str(work), "--output-last-message", str(last), QUESTION]
        environment = {**os.environ, "CODEX_HOME": str(home), "HOME": str(home)}
        subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=120)
        text = last.read_text()
    print(json.dumps({"reward": float(text == ANSWER), "metadata": {"text": text}}))


main(sys.argv[1])
