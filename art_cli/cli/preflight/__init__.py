"""The preflight of `art check`: every requirement of a run, tried once."""
