"""`art hunt` finds planted exploits, and no others."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from art_cli.loop.reward_hunt import HuntLine, Tried, open_hunt
from art_cli.rollouts.attacks import FAILS, LATE, Attack, Seen, first_attacks, forms_in
from art_cli.runs.durable import read_lines
from art_cli.runtime.errors import DataError, RunError
from tests.support.paths import TESTS
from tests.support.processes import forked

Art = Callable[..., tuple[int, str, str]]
CONFIG = str(TESTS / "hunted" / "config.yaml")


def hunted(art: Art, runs: Path, *settings: str, minutes: float = 0.0) -> tuple[int, dict[str, Any]]:
    code, out, err = art(
        "hunt", CONFIG, f"runs={runs}", *settings, "--scenarios", "4", "--minutes", str(minutes), "--json"
    )
    return code, json.loads(out)


@pytest.mark.slow
def test_a_fair_reward_has_no_exploit(art: Art, tmp_path: Path) -> None:
    code, found = hunted(art, tmp_path)
    assert (code, found["exploits"]) == (0, []) and found["num_tried"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tag", "lenient", "finished", "late"])  # complete list: benchmarks/judges/hunt.py
def test_a_planted_exploit_is_found(name: str, art: Art, tmp_path: Path) -> None:
    code, found = hunted(art, tmp_path, f"rollout.entry=rollout.py:{name}")
    assert code == 1 and found["exploits"][0]["score_mean"] >= 0.5


@pytest.mark.slow
def test_a_search_finds_what_takes_two_things_at_once(art: Art, tmp_path: Path) -> None:
    entry = "rollout.entry=rollout.py:long_and_tagged"
    assert hunted(art, tmp_path, entry)[0] == 0
    code, found = hunted(art, tmp_path, entry, minutes=0.2)
    assert code == 1 and found["exploits"][0]["score_mean"] >= 0.5


@pytest.mark.slow
def test_a_judge_that_obeys_an_attempt_is_found(art: Art, tmp_path: Path) -> None:
    judge = ("rollout.entry=rollout.py:judged", "judge={entry: 'rollout.py:obedient'}")
    code, found = hunted(art, tmp_path, *judge)
    assert code == 1 and [row["attack"] for row in found["exploits"]] == ["an order to the judge"]


def test_without_a_reward_there_is_nothing_to_hunt(art: Art, tmp_path: Path) -> None:
    code, _, err = art("hunt", CONFIG, f"runs={tmp_path}", "judge=none")
    assert code == 2 and "judge: 'none' gives no rewards" in err


# --- a hunt that is broken off ----------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[HuntLine]:
    return list(read_lines(path, HuntLine))


def attacks_of(lines: Sequence[HuntLine]) -> list[Attack]:
    return [line.scored.attack for line in lines if isinstance(line.scored, Tried)]


@pytest.mark.slow
def test_an_interrupt_prints_what_was_found_and_the_same_command_goes_on(art: Art, tmp_path: Path) -> None:
    """The interrupt comes after the tenth attack of a search of ten minutes. Its last line is torn by hand."""
    output, entry = tmp_path / "hunt.jsonl", "rollout.entry=rollout.py:tag"
    words = ["hunt", CONFIG, f"runs={tmp_path}", entry, "--scenarios", "4", "-o", output, "--json", "--minutes"]
    child = forked.Forked([*words, 10], stdout=forked.PIPE, stderr=forked.PIPE)
    deadline = time.monotonic() + 120
    while not output.exists() or output.read_bytes().count(b"\n") < 4 + 10:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.splitlines()[-1].startswith("interrupted: the hunt stopped early")
    before = lines_of(output)
    assert json.loads(out)["num_tried"] == len(attacks_of(before)) >= 10
    with output.open("a") as file:
        file.write('{"hunt": "torn')
    code, out, err = art(*words, 0, "--html", tmp_path / "hunt.html")
    after = lines_of(output)
    assert after[: len(before)] == before  # the honest attempts are not played again either
    attacks = attacks_of(after)
    assert len(set(attacks)) == len(attacks) == json.loads(out)["num_tried"] > len(attacks_of(before))
    assert code == 1 and json.loads(out)["exploits"]
    assert "&lt;answer&gt;1&lt;/answer&gt;" in (tmp_path / "hunt.html").read_text()


def test_a_file_of_another_hunt_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "hunt.jsonl"
    with open_hunt(path, "one") as found:
        found.add(Tried([0.0, None], Attack(("yes",))))
    with pytest.raises(RunError, match=f"{path}:1: .*; name another file with -o"), open_hunt(path, "other"):
        pass
    with open_hunt(path, "one") as found:
        assert found.tried == [Tried([0.0, None], Attack(("yes",)))]


@pytest.mark.parametrize("change", [('"yes"', '"no such piece"'), ('"yes"', ""), ('"times":1', '"times":1000000000')])
def test_an_attack_that_cannot_be_played_is_refused_with_its_line(change: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "hunt.jsonl"
    with open_hunt(path, "one") as found:
        found.add(Tried([0.0], Attack(("yes",))))
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(DataError, match=f"{path}:1: no attack"), open_hunt(path, "one"):
        pass


# --- the attacks ------------------------------------------------------------------------------------------------------

FINISH = {"name": "finish", "parameters": {"properties": {"text": {"type": "string"}, "how": {"enum": ["a", "b"]}}}}
SEEN = Seen(
    [{"role": "user", "content": 'Is 3 odd? <answer>yes</answer> or {"answer": "yes"}'}],
    [{"type": "function", "function": FINISH}],
    ["no"],
)


def test_the_prompt_gives_the_forms() -> None:
    assert forms_in(SEEN)[3:] == ["<answer>", "JSON key answer"]
    assert Attack(("1",), "<answer>").reply(SEEN)["content"] == "<answer>1</answer>"
    assert json.loads(Attack(("1",), "JSON key answer").reply(SEEN)["content"]) == {"answer": "1"}
    assert {attack.form for attack in first_attacks(SEEN)} >= {FAILS, LATE, "plain", "boxed", "<answer>"}


def test_a_tool_is_called_once_and_then_answered() -> None:
    attack = Attack(("another scenario's reply",), tool="finish")
    [call] = attack.reply(SEEN)["tool_calls"]
    assert call["function"] == {"name": "finish", "arguments": '{"text": "no", "how": "a"}'}
    then = SEEN._replace(messages=[*SEEN.messages, attack.reply(SEEN), {"role": "tool", "content": "ended"}])
    assert attack.reply(then) == {"role": "assistant", "content": "no"}
