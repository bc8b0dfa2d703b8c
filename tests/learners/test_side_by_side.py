"""Packs in threads side by side: the same bits as one after the other, in their order, and nothing after a failure."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from art_cli.config.schema import PpoConfig
from art_cli.learners.algorithms.presets import UserAlgorithm
from art_cli.learners.packs import logprob_reader as module
from art_cli.learners.packs.logprob_reader import side_by_side
from art_cli.runtime.plugins import resolve
from tests.support.models.gradients import learner
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import sampled, scored, turn


def test_results_come_in_the_order_of_the_items_from_as_many_threads_as_are_allowed() -> None:
    together = threading.Barrier(3, timeout=10)

    def compute(item: int) -> tuple[int, str, int]:
        if item < 3:
            together.wait()  # three are computed at a time
        time.sleep(0.02 if item % 2 else 0)
        return item, threading.current_thread().name, torch.get_num_threads()

    found = list(side_by_side(compute, range(9), num_threads=3))
    assert [item for item, _, _ in found] == list(range(9))
    assert len({name for _, name, _ in found}) == 3
    assert {threads for *_, threads in found} == {1}, "each computes without a pool"


def test_one_thread_is_the_callers_own() -> None:
    assert set(side_by_side(lambda _: threading.get_ident(), range(3), num_threads=1)) == {threading.get_ident()}
    assert list(side_by_side(lambda _: threading.get_ident(), [0])) == [threading.get_ident()], "one item"


def test_a_failure_is_raised_in_its_place_and_later_items_are_left() -> None:
    begun: list[int] = []

    def compute(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise ValueError("item 1")
        return item

    results = side_by_side(compute, range(100), num_threads=2)
    assert next(results) == 0
    with pytest.raises(ValueError, match="item 1"):
        list(results)
    assert len(begun) < 10


@pytest.mark.parametrize(
    "policy",
    [{"lora_rank": 4}, {"lora_rank": None}, {"lora_rank": None, "tied": False}],
    ids=["an adapter", "all weights", "all weights, with a head of their own"],
)
def test_the_gradient_has_the_same_bits_on_any_number_of_cores(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs, so that the second begins at other weights; small packs, so that there are several; and a critic."""
    draw = random.Random(0)
    shapes = [[[draw.randrange(5, 60) for _ in range(length)] for length in (3, 4)] for _ in range(12)]
    found, num_packs = [], set()

    def watched(compute: Any, packs: Sequence[Any], **given: Any) -> Iterator[Any]:
        num_packs.add(len(packs))
        return side_by_side(compute, packs, **given)

    monkeypatch.setattr("art_cli.learners.step.gradient.side_by_side", watched)
    for cores in (1, 2, 5):
        weights = tiny_weights(seed=1, **policy)
        trained = learner(weights, PpoConfig(name="ppo", value_trunk=True), micro_batch_tokens=16, epochs_per_step=2)
        trained.runner.can_pack = trained.packing.has_compared = True
        monkeypatch.setattr(module, "num_cores", lambda cores=cores: cores)
        groups = [
            [scored(sampled(weights, [turn(prompt, answer)]), float(index % 3), group=str(index))]
            for index, (prompt, answer) in enumerate(shapes)
        ]
        trained.step(groups)
        assert trained.critic is not None
        found.append([*trained.parameters.values(), *trained.critic.head.parameters()])
    assert min(num_packs) > 2, "else nothing was computed side by side"
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_an_algorithm_of_the_users_own_is_called_for_one_pack_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import threading\n"
        "from art_cli.learners.algorithms import Algorithm\n"
        "class Mine(Algorithm):\n"
        "    threads = set()\n"
        "    def objective(self, terms):\n"
        "        self.threads.add(threading.get_ident())\n"
        "        return super().objective(terms)\n"
    )
    monkeypatch.setattr(module, "num_cores", lambda: 4)
    weights = tiny_weights(seed=1)
    own = UserAlgorithm("mine.py:Mine", {}, tmp_path)
    trained = learner(weights, micro_batch_tokens=16)
    trained.algorithm = trained.gradient.algorithm = own
    trained.runner.can_pack = trained.packing.has_compared = True
    answers = [[20 + index, 21, 22] for index in range(8)]
    group = [
        scored(sampled(weights, [turn([1, 2, 3], answer)]), float(index), index=index)
        for index, answer in enumerate(answers)
    ]
    trained.step([group])
    assert resolve("mine.py:Mine", base=tmp_path).threads == {threading.get_ident()}
