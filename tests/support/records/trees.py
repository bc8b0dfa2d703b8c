"""Makes trajectories for learner tests: whole prefix trees of turns, sampled (on paper) by given weights."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from art_cli.learners.samples import Credit, Sample, token_weights, trajectory_samples
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, Turn, score_trajectory, sequence


def logprobs_of(weights: Weights, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[L - 1] the plain way: one sequence through the whole model, log-softmax over everything."""
    ids = torch.tensor(list(token_ids), device=weights.device)
    logits = weights.model(ids[None]).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@torch.no_grad()
def sampled(weights: Weights, turns: Sequence[Turn], *, noise: float = 0.0, seed: int = 0) -> list[Turn]:
    """The turns with the logprobs their tokens have under `weights`, plus noise: an older policy sampled them."""
    generator = torch.Generator().manual_seed(seed)
    done = []
    for index, turn in enumerate(turns):
        ids = sequence(turns, index)
        count = len(turn.sampled_ids)
        fields = {name: getattr(turn, name) for name in Turn.__struct_fields__}
        for name, temperature in (("logprobs", turn.temperature or 1.0), ("raw_logprobs", 1.0)):
            exact = logprobs_of(weights, ids, temperature)[len(ids) - 1 - count :].cpu()
            fields[name] = (exact + noise * torch.randn(count, generator=generator)).tolist()
        done.append(Turn(**fields))
    return done


def turn(
    prompt: Sequence[int], sampled: Sequence[int], *, parent: int | None = None, kept: int = 0, **fields: object
) -> Turn:
    blank = [0.0] * len(sampled)
    values = {"logprobs": blank, "raw_logprobs": blank, "step": 0, "temperature": 1.0, **fields}
    return Turn(parent=parent, kept=kept, prompt_ids=list(prompt), sampled_ids=list(sampled), **values)  # type: ignore[arg-type]


def scored(
    turns: Sequence[Turn], reward: float | None, *, index: int = 0, group: str = "g", **fields: object
) -> ScoredTrajectory:
    trajectory = Trajectory(
        id=f"{group}/{index}",
        group_id=group,
        group_size=8,
        index=index,
        turns=list(turns),
        **fields,  # type: ignore[arg-type]
    )
    return score_trajectory(trajectory, reward)


def samples_of(trajectory: Trajectory, credit: Credit | float = 1.0) -> list[Sample]:
    return trajectory_samples(trajectory, token_weights(trajectory, credit))


@st.composite
def turn_trees(draw: st.DrawFn, num_turns: int) -> list[Turn]:
    """Turns that go on from each other, whole or from anywhere inside, to depth 4; few tokens, much is shared."""
    token = st.integers(0, 3)
    turns: list[Turn] = []
    depths: list[int] = []
    for index in range(num_turns):
        open_turns = [i for i in range(index) if depths[i] < 4]
        parent = draw(st.sampled_from([None, *open_turns]))
        kept = 0
        if parent is not None:
            length = len(sequence(turns, parent))
            kept = draw(st.one_of(st.just(length), st.integers(1, length)))
        prompt = draw(st.lists(token, min_size=1 if parent is None else 0, max_size=4))
        made = draw(st.lists(token, min_size=0 if prompt else 1, max_size=4))
        temperature = draw(st.sampled_from([1.0, 1.0, 0.7]))
        turns.append(turn(prompt, made, parent=parent, kept=kept, temperature=temperature))
        depths.append(1 if parent is None else depths[parent] + 1)
    return turns
