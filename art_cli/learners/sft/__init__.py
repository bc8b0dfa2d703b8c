"""Supervised training on examples: the warm-up before a run, and `art sft`."""
