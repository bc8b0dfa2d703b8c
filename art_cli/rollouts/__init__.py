"""Runs the user's agent: scenarios in, trajectories out.

scenarios.py   reads scenarios, and says which ones a step plays
policy.py      Policy and Outcome: what a rollout function gets and may return
runner.py      many rollouts at once: concurrency, timeouts, turn limits, retries; each becomes a Trajectory
gateway.py     the capturing OpenAI-compatible proxy; the per-rollout key says which trajectory a call belongs to
recorder.py    one rollout's calls as a prefix tree of turns and a tree of messages
"""
