"""Rollouts for other tools: model calls in order, made into spans, inspect's logs and rows of a table.

Here a trajectory is only read. `art log` and the trackers send and write what this room makes of it.
"""
