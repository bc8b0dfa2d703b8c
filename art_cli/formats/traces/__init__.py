"""Export of rollouts to other tools: ordered model calls as spans, inspect logs and table rows.

Read-only access to trajectories. `art log` and the trackers send and write the results.
"""
