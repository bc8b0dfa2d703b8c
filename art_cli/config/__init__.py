"""The configuration of a run: Hydra composes it, pydantic judges it. No torch anywhere below.

schema.py    RunConfig and its sections: every knob, its default and what it means
compose.py   a YAML file and command-line overrides -> one plain dict -> RunConfig, all mistakes at once
"""
