"""CallCounts: totals over the calls of all rollouts. The gateway updates them, and Concurrency reads them."""

from dataclasses import dataclass, fields


@dataclass
class CallCounts:
    """Sums since the runner last took the counts."""

    answered: int = 0
    refused: int = 0  # calls refused with a rate-limit status
    tokens: int = 0  # reply tokens, and prompt tokens that are new to their rollout
    busy_s: float = 0.0  # sum of seconds from request to reply
    idle_s: float = 0.0  # total seconds in which a rollout had no call in flight
    computed: int = 0  # tokens that the engine computed in the same time; `Concurrency.note` sets it

    def add(self, more: "CallCounts") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))
