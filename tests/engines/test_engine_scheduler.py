"""The scheduler against a model of the cache: a slot's row holds what was computed there, token by token.

A token's key-value entry is modeled as a hash of its prefix and the weights' version, and the next token as a function
of this hash. So any stale, foreign or missing entry changes the output.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.engines.embedded.scheduler import Scheduler, StepPlan, TokenSequence

VOCAB = 50
MAX_LENGTH = 200


def entry(before: int, token: int, version: int) -> int:
    return hash((before, token, version))


def next_token(last_entry: int) -> int:
    return last_entry % VOCAB


def expected(prompt: list[int], limit: int, version: int = 0) -> list[int]:
    tokens, last = list(prompt), 0
    for token in prompt:
        last = entry(last, token, version)
    while len(tokens) < limit:
        tokens.append(next_token(last))
        last = entry(last, tokens[-1], version)
    return tokens[len(prompt) :]


Cell = tuple[int, int] | None  # (entry, token); None: nothing was ever computed here


class FakeRunner:
    """Executes a plan on rows of entries, and fails if any token would attend to a wrong entry."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = []
        self.version = 0
        self.num_computed = 0

    def run(self, plan: StepPlan) -> np.ndarray:
        self._resize(*plan.shape)
        for copy in plan.copies:
            for target in copy.targets:
                assert target != copy.source
                self.rows[target][: copy.length] = self.rows[copy.source][: copy.length]
        for before, slot, num in zip(plan.decodes[:-1], plan.decodes[1:], plan.shared[1:], strict=True):
            assert self.rows[before][:num] == self.rows[slot][:num], "said to be shared, and is not"
        last: dict[int, int] = {}
        for token, slot, position in zip(plan.tokens_T, plan.slots_T, plan.positions_T, strict=True):
            before = last[slot] if slot in last else self._check(slot, position)
            last[slot] = entry(before, int(token), self.version)
            self.rows[slot][position] = (last[slot], int(token))
            self.num_computed += 1
        cells = [self.rows[plan.slots_T[row]][plan.positions_T[row]] for row in plan.rows]
        return np.array([next_token(cell[0]) for cell in cells if cell is not None], np.int64)

    def _resize(self, slots: int, length: int) -> None:
        self.rows = [row[:length] + [None] * (length - len(row)) for row in self.rows[:slots]]
        self.rows += [[None] * length for _ in range(slots - len(self.rows))]

    def _check(self, slot: int, end: int) -> int:
        """Returns entry `end - 1` of a row, after checking all entries up to it."""
        last = 0
        for cell in self.rows[slot][:end]:
            assert cell is not None, "attends to an entry that was never computed"
            last = entry(last, cell[1], self.version)
            assert cell[0] == last, "attends to a stale or foreign entry"
        return last


def make(max_slots: int = 4, prefill_tokens: int = 64, max_tokens: int = 10_000) -> Scheduler:
    return Scheduler(max_slots=max_slots, prefill_tokens=prefill_tokens, max_length=MAX_LENGTH, max_tokens=max_tokens)


def step(scheduler: Scheduler, runner: FakeRunner) -> list[TokenSequence]:
    plan = scheduler.plan()
    if plan is None:
        return []
    ids = runner.run(plan)
    logprobs = np.array([-float(id) for id in ids], np.float32)
    return scheduler.commit(plan, ids, logprobs, logprobs * 2, np.zeros(len(ids), np.bool_))


def drain(scheduler: Scheduler, runner: FakeRunner, most: int = 5000) -> None:
    for _ in range(most):
        if scheduler.is_idle:
            return
        step(scheduler, runner)
    raise AssertionError("the scheduler does not come to an end")


def sequence(prompt: list[int], num: int) -> TokenSequence:
    return TokenSequence(np.array(prompt, np.int64), len(prompt) + num)


prompts = st.builds(
    lambda stem, length, tail: [(stem * 7 + i) % VOCAB for i in range(length)] + tail,
    st.integers(0, 1),
    st.sampled_from([0, 5, 20, 60, 90, 120]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("group"), prompts, st.integers(1, 5)),
        st.tuples(st.just("add"), prompts, st.integers(1, 70)),
        st.tuples(st.just("step"), st.integers(1, 3), st.none()),
        st.tuples(st.just("step"), st.integers(10, 40), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 30), st.none()),
        st.tuples(st.just("next turn"), st.integers(0, 30), st.integers(1, 20)),
        st.tuples(st.just("other weights"), st.none(), st.none()),
    ),
    min_size=5,
    max_size=60,
)


class Play:
    """Carries out a list of actions and remembers what must come of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.runner = scheduler, FakeRunner()
        self.sequences: list[TokenSequence] = []
        self.dropped: set[int] = set()
        self.straddling: set[int] = set()  # ran under two versions of the weights

    def do(self, action: str, first: Any, second: Any) -> None:
        if action == "group":
            for extra in range(second):
                self.add(first, 5 + extra)
        elif action == "add":
            self.add(first, second)
        elif action == "step":
            for _ in range(first):
                step(self.scheduler, self.runner)
        elif action == "other weights":
            self.scheduler.invalidate()
            self.runner.version += 1
            self.straddling |= {id(one) for one in self.sequences if self.scheduler.num_sampled(one)}
        elif self.sequences:
            self.do_with(self.sequences[first % len(self.sequences)], action, second)

    def do_with(self, chosen: TokenSequence, action: str, number: int) -> None:
        if action == "next turn":
            self.add([*chosen.prompt.tolist(), *chosen.sampled.tolist(), 1, 2, 3], number)
        elif action == "cancel":
            self.scheduler.cancel(chosen)
            self.dropped.add(id(chosen))
        elif chosen.slot >= 0:
            self.scheduler.finish(chosen, "stop")
            self.dropped.add(id(chosen))

    def add(self, prompt: list[int], num: int) -> None:
        if len(prompt) + num <= MAX_LENGTH:
            self.sequences.append(sequence(prompt, num))
            self.scheduler.add(self.sequences[-1])


@pytest.mark.slow
@given(actions, st.integers(1, 6), st.sampled_from([3, 16, 64]), st.sampled_from([256, 400, 700, 5000]))
def test_every_sequence_ends_as_if_it_were_alone(
    todo: list[tuple[str, Any, Any]], max_slots: int, prefill_tokens: int, max_tokens: int
) -> None:
    """After any sequence of adds, cancels, preemptions and reuses, results equal those computed from prompts alone."""
    play = Play(make(max_slots, prefill_tokens, max_tokens))
    for action in todo:
        play.do(*action)
    drain(play.scheduler, play.runner)
    assert not play.scheduler.running
    for one in play.sequences:
        sampled = one.sampled.tolist()
        assert one.slot == -1
        assert one.logprobs.tolist() == [-float(token) for token in sampled]
        assert one.raw_logprobs.tolist() == [-2 * float(token) for token in sampled]
        if id(one) not in play.dropped:
            assert one.finish_reason == "length" and len(one.prompt) + len(sampled) == one.limit
        if id(one) not in play.straddling and sampled:
            versions = range(play.runner.version + 1)
            end = len(one.prompt) + len(sampled)
            assert sampled in [expected(one.prompt.tolist(), end, version) for version in versions]


def test_the_attempts_of_a_group_compute_their_prompt_once() -> None:
    """8 attempts, prompt 100, 5 new: 100 + 8 * (5 - 1) tokens and the last prompt token of 7: 139, not 832."""
    scheduler, runner = make(max_slots=8, prefill_tokens=1000), FakeRunner()
    group = [sequence(list(range(100)), 5) for _ in range(8)]
    for one in group:
        scheduler.add(one)
    drain(scheduler, runner)
    assert runner.num_computed == 100 + 8 * 4 + 7
    assert [one.num_reused for one in group] == [0] + [99] * 7


def test_the_next_turn_computes_only_what_is_new() -> None:
    """Turn 1: 50 prompt + 10 sampled, 59 of them in the cache. Turn 2 adds 6: 7 tokens to compute before it samples."""
    scheduler, runner = make(), FakeRunner()
    first = sequence(list(range(50)), 10)
    scheduler.add(first)
    drain(scheduler, runner)
    before = runner.num_computed
    second = sequence([*range(50), *first.sampled.tolist(), 1, 2, 3, 4, 5, 6], 4)
    scheduler.add(second)
    drain(scheduler, runner)
    assert second.num_reused == 59
    assert runner.num_computed - before == 7 + 3


def test_conversations_keep_their_slots_while_others_run() -> None:
    """Three interleaved conversations with 5 turns, 4 slots: turns reuse all but the final token and the new text."""
    scheduler, runner = make(max_slots=4), FakeRunner()
    histories = [[stem] * 20 for stem in range(3)]
    for turn in range(5):
        batch = [sequence(history, 8) for history in histories]
        for one in batch:
            scheduler.add(one)
        drain(scheduler, runner)
        for history, one in zip(histories, batch, strict=True):
            assert one.num_reused == (0 if turn == 0 else len(history) - 3)
            history += [*one.sampled.tolist(), 7, 8]


def test_a_branch_leaves_the_old_sequence_its_slot() -> None:
    """A: 40 tokens and 20 sampled. B shares 30 of them: they are copied, and A's next turn still finds all."""
    scheduler, runner = make(max_slots=3), FakeRunner()
    one = sequence(list(range(40)), 20)
    scheduler.add(one)
    drain(scheduler, runner)
    branch = sequence([*range(30), 49, 49], 5)
    scheduler.add(branch)
    drain(scheduler, runner)
    following = sequence([*one.prompt.tolist(), *one.sampled.tolist(), 3], 5)
    scheduler.add(following)
    drain(scheduler, runner)
    assert (branch.num_reused, following.num_reused) == (30, 59)


def test_the_least_recently_used_slot_is_overwritten() -> None:
    """Two slots hold A, then B; A is used again; C takes B's slot, so that B has to be computed anew and A has not."""
    scheduler, runner = make(max_slots=2), FakeRunner()

    def run(stem: int, tail: list[int]) -> int:
        one = sequence([stem] * 40 + tail, 1)
        scheduler.add(one)
        drain(scheduler, runner)
        return one.num_reused

    assert (run(1, []), run(2, []), run(1, [5])) == (0, 0, 40)
    assert run(3, []) == 0
    assert run(1, [5, 6]) == 41
    assert run(2, []) == 0


def test_changed_weights_leave_nothing_to_reuse() -> None:
    """Running sequences are recomputed from their tokens; prompts cached in idle slots are recomputed whole."""
    scheduler, runner = make(), FakeRunner()
    idle, running = sequence(list(range(60)), 3), sequence([9] * 30, 40)
    scheduler.add(idle)
    scheduler.add(running)
    for _ in range(10):
        step(scheduler, runner)
    kept = scheduler.num_sampled(running)
    assert idle.finish_reason == "length" and kept > 0
    scheduler.invalidate()
    runner.version = 1
    again = sequence(list(range(60)), 3)
    scheduler.add(again)
    drain(scheduler, runner)
    assert again.num_reused == 0
    assert again.sampled.tolist() == expected(list(range(60)), 63, version=1)
    old = expected([9] * 30, 30 + kept, version=0)  # tokens sampled stay, what follows is of the new weights
    assert running.sampled.tolist() == old + expected([9] * 30 + old, 70, version=1)


def test_without_the_invalidation_the_model_of_the_cache_notices() -> None:
    """The test above can fail: the same without `invalidate` attends to stale entries."""
    scheduler, runner = make(), FakeRunner()
    scheduler.add(sequence(list(range(60)), 3))
    drain(scheduler, runner)
    runner.version = 1
    scheduler.add(sequence(list(range(60)), 3))
    with pytest.raises(AssertionError, match="stale"):
        drain(scheduler, runner)


def test_cancelling_frees_the_slot_and_the_queue() -> None:
    scheduler, runner = make(max_slots=1), FakeRunner()
    running, waiting, last = sequence([1] * 20, 100), sequence([2] * 20, 100), sequence([3] * 20, 2)
    for one in (running, waiting, last):
        scheduler.add(one)
    for _ in range(3):
        step(scheduler, runner)
    scheduler.cancel(running)
    scheduler.cancel(waiting)
    step(scheduler, runner)
    assert list(scheduler.running.values()) == [last]


def test_long_prompts_come_in_chunks_beside_decoding() -> None:
    """A prompt with 100 tokens at 16 per step takes 7 steps (6 * 16 + 4); meanwhile the other sequence samples."""
    scheduler, runner = make(prefill_tokens=16), FakeRunner()
    first = sequence([1], 50)
    scheduler.add(first)
    step(scheduler, runner)
    long = sequence([2] * 100, 5)
    scheduler.add(long)
    for count in range(1, 8):
        step(scheduler, runner)
        assert scheduler.num_sampled(first) == 1 + count
        assert scheduler.num_sampled(long) == (1 if count == 7 else 0)


def test_a_tight_budget_preempts_and_still_finishes_all() -> None:
    """256 tokens for 4 sequences that grow to 80: not all fit at once, each comes out whole."""
    scheduler, runner = make(max_slots=4, max_tokens=256), FakeRunner()
    group = [sequence([stem] * 10, 70) for stem in range(4)]
    for one in group:
        scheduler.add(one)
    drain(scheduler, runner)
    assert scheduler.num_preempted > 0
    for one in group:
        assert one.sampled.tolist() == expected(one.prompt.tolist(), one.limit)


def test_slots_get_shorter_again_where_that_gives_more_of_them() -> None:
    """400 tokens of cache: a sequence of 160 leaves room for 2 slots of 192; 3 short ones at once get 64 each."""
    scheduler, runner = make(max_slots=6, max_tokens=400), FakeRunner()
    scheduler.add(sequence([i % VOCAB for i in range(150)], 10))
    drain(scheduler, runner)
    assert scheduler.shape == (2, 192)
    for stem in range(3):
        scheduler.add(sequence([stem] * 10, 3))
    step(scheduler, runner)
    assert (len(scheduler.running), scheduler.shape.length) == (3, 64)


def test_a_slot_that_is_being_copied_is_not_cut_off() -> None:
    """512 tokens: 8 slots of 64. B copies from slot 5 to slot 0; C needs 192 a slot, which leaves 2: it comes later."""
    scheduler, runner = make(max_slots=8, max_tokens=512), FakeRunner()
    for stem in range(8):
        scheduler.add(sequence([stem] * 40, 3))
    drain(scheduler, runner)
    branch, long = sequence([5] * 30 + [1], 3), sequence([9] * 120, 3)
    scheduler.add(branch)
    scheduler.add(long)
    drain(scheduler, runner)
    assert branch.num_reused == 30
    assert branch.sampled.tolist() == expected([5] * 30 + [1], 34)
    assert long.sampled.tolist() == expected([9] * 120, 123)


def test_first_come_first_served() -> None:
    scheduler, runner = make(max_slots=2), FakeRunner()
    queue = [sequence([stem] * 5, 3) for stem in range(6)]
    for one in queue:
        scheduler.add(one)
    ended: list[TokenSequence] = []
    while not scheduler.is_idle:
        ended += step(scheduler, runner)
    assert ended == queue
