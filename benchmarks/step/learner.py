"""The training step against TRL's GRPOTrainer, and trees against rows: same recorded batch, weights and loss, in turn.

    python -m benchmarks.step.learner [--repeats 5] [--case shared] [--tune]

Figure 1, a 24M-parameter Qwen3 with LoRA of rank 16 on all linear layers, float32: `shared`, 4 prompts of 240 tokens
with 8 completions of 64 each; `long`, the same with prompts of 800; `alone`, 32 prompts with one completion each;
`bfloat16`, the first with a bfloat16 base against our own float32. Figure 2: `turns`, 8 attempts of 6 turns with
sub-agents, trees against rows.

Timed is one optimizer step. Ours: TorchLearner.step, from scored trajectories on (samples, packs, forward, loss,
backward, clip, AdamW, metrics). TRL's: its training_step for each micro-batch (_prepare_inputs, which slices the
recorded batch, compute_loss, backward), accelerate's clip, AdamW; neither its generation and scoring nor its callbacks
are, nor is there any padding. It runs without gradient checkpointing (its default is with), num_iterations 1, beta 0,
without computing old logprobs, at the micro-batch that is fastest of 2, 4 and 8 sequences here (`--tune` measures).
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.shared.sides import Memory, Row, Side, Taken, in_turn, ratio, seconds, table
from benchmarks.step.batches import Groups, make_learner, multi_turn, single_turn
from benchmarks.step.trl_step import TrlStep


class Case(NamedTuple):
    """A batch of single turns, and TRL's side of it."""

    prompts: int
    attempts: int
    prompt: int
    trl_batch: int  # sequences of a micro-batch
    target: str

    def groups(self) -> Groups:
        return single_turn(self.prompts, self.attempts, prompt=self.prompt, completion=64)


CASES = {
    "shared": Case(4, 8, 240, 4, ">= 4"),
    "long": Case(4, 8, 800, 2, ">= 7"),
    "alone": Case(32, 1, 240, 4, ">= 1.3"),
}
OTHERS = ("bfloat16", "turns")
SLOW_REPEATS = 3  # repetitions of TRL and of rows, which take most of the time


class Ours:
    def __init__(self, groups: Groups, dtype: str = "float32", packing: str = "tree") -> None:
        import torch

        from benchmarks.shared.models import build

        self.learner = make_learner(build("24M", has_adapter=True, dtype=getattr(torch, dtype)), packing=packing)
        self.groups = groups
        self.memory = Memory()
        self.metrics: Any = None

    def step(self) -> None:
        self.metrics = self.learner.step(self.groups)

    def tokens(self) -> tuple[int, int]:
        """(computed, flat) of the last step."""
        return self.metrics.tokens_computed, self.metrics.tokens_flat

    def peak(self) -> float:
        return self.memory.peak()

    def gradient(self) -> dict[str, Any]:
        """Of each trained weight, before it is clipped."""
        taken: dict[str, Any] = {}
        optimizer: Any = self.learner.optimizer
        clip = optimizer.clip

        def keep() -> float:
            taken.update({name: p.grad.numpy().copy() for name, p in optimizer.parameters.items()})
            norm: float = clip()
            return norm

        optimizer.clip = keep
        self.step()
        optimizer.clip = clip
        return taken


class Trl(TrlStep):
    def __init__(self, groups: Groups, batch: int) -> None:
        from benchmarks.shared.models import build

        super().__init__(build("24M", has_adapter=True).model, recorded(groups), batch)


def recorded(groups: Groups) -> dict[str, Any]:
    """What TRL's generation would give for the batch, with our advantages."""
    import torch

    from art_cli.config.schema import GrpoConfig
    from art_cli.learners.algorithms.presets import build_algorithm
    from art_cli.learners.step.step_samples import make_step_samples

    turns = [trajectory.turns[0] for group in groups for trajectory in group]
    prompts = torch.tensor([turn.prompt_ids for turn in turns])
    completions = torch.tensor([turn.sampled_ids for turn in turns])
    batch = make_step_samples(groups, build_algorithm(GrpoConfig(), max_tokens=completions.shape[1]))
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.tensor([sample.advantages[0] for group in batch.groups for sample in group]).float(),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }


def against_trl(name: str, *, repeats: int, tune: bool) -> list[Row]:
    """Figure 1 of one case: time, memory, gradient."""
    case = CASES[name]
    groups = case.groups()
    batch = _fastest(groups, repeats=1) if tune else case.trl_batch
    sides = {"ours": Side(Ours, groups), "trl": Side(Trl, groups, batch)}
    gap = _difference(*(side.call("gradient") for side in sides.values()))  # warms both up
    taken = _in_turn(sides, repeats)
    computed, flat = sides["ours"].call("tokens")
    ours_mb, trl_mb = (side.call("peak") for side in sides.values())
    for side in sides.values():
        side.close()
    note = f"{computed} of {flat} tokens; TRL micro-batch {batch}; gradient differs by {gap:.1e}"
    return [
        Row("1", f"{name}: step", seconds(taken["ours"]), seconds(taken["trl"]), ratio(taken["trl"], taken["ours"]),
            case.target, note),
        Row("1", f"{name}: peak above the loaded model", f"{ours_mb:.0f} MB", f"{trl_mb:.0f} MB",
            round(trl_mb / ours_mb, 2), ">= 2" if name != "alone" else ""),
    ]  # fmt: skip


def _in_turn(sides: dict[str, Side], repeats: int) -> dict[str, list[Taken]]:
    """The first side `repeats` times, the slower second one at most SLOW_REPEATS times; in turn while both are."""
    taken = in_turn(sides, min(repeats, SLOW_REPEATS))
    first = next(iter(sides))
    taken[first] += in_turn({first: sides[first]}, repeats - len(taken[first]))[first]
    return taken


def _fastest(groups: Groups, *, repeats: int) -> int:
    """The micro-batch at which TRL is fastest here."""
    found = {}
    for batch in (2, 4, 8):
        side = Side(Trl, groups, batch)
        side.call("step")
        found[batch] = min(side.take().wall_s for _ in range(repeats))
        side.close()
        print(f"TRL, micro-batch {batch}: {found[batch]:.2f} s", flush=True)
    return min(found, key=lambda batch: found[batch])


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """|ours - theirs| / |theirs| over all weights together."""
    import numpy as np

    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:3]
    left, right = (np.concatenate([gradient[name].ravel() for name in sorted(ours)]) for gradient in (ours, theirs))
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


def bfloat16(*, repeats: int) -> list[Row]:
    """Our own step with the frozen base in bfloat16, against float32."""
    groups = CASES["shared"].groups()
    sides = {"bfloat16": Side(Ours, groups, "bfloat16"), "float32": Side(Ours, groups)}
    for side in sides.values():
        side.call("step")
    taken = in_turn(sides, repeats)
    for side in sides.values():
        side.close()
    return [
        Row("1", "shared: bfloat16 base against our float32", seconds(taken["bfloat16"]), seconds(taken["float32"]),
            ratio(taken["float32"], taken["bfloat16"]), ">= 2 with AMX")
    ]  # fmt: skip


def turns(*, repeats: int) -> list[Row]:
    """Figure 2: how much of the tokens saved becomes time."""
    groups = multi_turn(8, turns=6)
    sides = {"tree": Side(Ours, groups), "rows": Side(Ours, groups, "float32", "rows")}
    for side in sides.values():
        side.call("step")
    taken = _in_turn(sides, repeats)
    computed, flat = sides["tree"].call("tokens")
    for side in sides.values():
        side.close()
    time_ratio, token_ratio = ratio(taken["rows"], taken["tree"]), flat / computed
    return [
        Row("2", "8 attempts x 6 turns with sub-agents: trees against rows", seconds(taken["tree"]),
            seconds(taken["rows"]), time_ratio, f">= {0.8 * token_ratio:.2f}",
            f"{computed} of {flat} tokens: {token_ratio:.2f}; {time_ratio / token_ratio:.2f} of it in time")
    ]  # fmt: skip


def measure(cases: Sequence[str] = (*CASES, *OTHERS), *, repeats: int = 5, tune: bool = False) -> list[Row]:
    rows: list[Row] = []
    for name in cases:
        if name in CASES:
            rows += against_trl(name, repeats=repeats, tune=tune)
        else:
            rows += {"bfloat16": bfloat16, "turns": turns}[name](repeats=repeats)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=[*CASES, *OTHERS], action="append")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    cases = arguments.case or [*CASES, *OTHERS]
    print(table(measure(cases, repeats=arguments.repeats, tune=arguments.tune)))


if __name__ == "__main__":
    main()
