"""The `improve` section, for `art improve`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from art_cli.config.sections.base_config import Float, NonNegative, PositiveFloat, PositiveInt, Section
from art_cli.config.sections.rollout_config import Scenarios

Share = Annotated[Float, Field(gt=0, lt=1)]
GatedSet = Literal["tasks", "traffic", "safety"]


class CanaryConfig(Section):
    """The trial of a candidate on live conversations. Feedback decides when the trial ends."""

    metric: str
    """The metric of `gateway.feedback` that decides: a boolean, or a float from 0 to 1 (other values count as the
    nearest of these)."""
    share: Share = 0.2
    """The share of conversations that the candidate answers."""
    error: Share = 0.05
    """The largest probability that a candidate is promoted although it is not better, and that a candidate is rolled
    back although it is not worse. The bound holds at every look."""
    margin: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Also promotes a candidate that is worse by less than this."""
    max_ratings: PositiveInt = 5000
    """The ratings after which an undecided candidate is rolled back. From a quarter of them on, a candidate that will
    hardly show a gain is rolled back earlier. If its ratings were promising, the next night trains it on."""
    max_hours: PositiveFloat = 168.0
    """The hours after which an undecided candidate is rolled back."""
    client_share: Share = 0.1
    """The largest share of the ratings that count from a client, and from a user (tag `user`) of a client; or twice an
    even share, if this is more."""


class ImproveConfig(Section):
    """Learning from the traffic of `art gateway`, night by night (docs/gateway.md)."""

    canary: CanaryConfig
    traffic: list[Path] = []
    """The directories of `art gateway`. []: the directory of this configuration's gateway."""
    scenario: str | None = None
    """Your function "file.py:function" that makes a scenario from a conversation, or None to leave it out:
    scenario(conversation, feedback), both JSON. null: {"id", "messages", "tools"} of the first call."""
    min_scenarios: Annotated[PositiveInt, Field(ge=2)] = 20
    """The new scenarios that a night needs. One trains and one tests at least."""
    max_scenarios: PositiveInt = 500
    """The limit on a night's new scenarios. The newest are taken."""
    held_out: Share = 0.2
    """The newest share of the scenarios. It tests candidates for a week, and is not trained on meanwhile."""
    rehearsal: NonNegative = 1.0
    """The number of the run's own training scenarios that a night repeats, per scenario from traffic."""
    steps: PositiveInt = 16
    """The training steps per night."""
    safety: Scenarios | None = None
    """More scenarios that every candidate plays, written like `rollout.scenarios`."""
    gates: dict[GatedSet, str] = {
        "tasks": "reward.high>=baseline",
        "traffic": "reward>=baseline-0.02",
        "safety": "reward>=baseline",
    }
    """What a candidate must reach before it answers users, as in `art eval --gate`. The baseline is the promoted
    policy. tasks: the scenarios of `eval`, often few and older than the traffic, so only a significant loss fails.
    traffic: the held-out scenarios of the last week. safety: any loss fails. If its rewards are noisy, a policy that is
    as good fails half the time; with `reward.high>=baseline` only a significant loss fails."""
    patience: PositiveInt = 5
    """The nights in a row without a promotion after which `art improve` begins no further night."""
