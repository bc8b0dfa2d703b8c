"""Tinker protocol client. A remote server stores the policy's weights, trains and samples.

tinker/tinker_engine.py samples through it, and tinker/tinker_learner.py trains through it. `art backend`
(tinker/server/) is such a server. The SDK is imported when a connection opens. Its telemetry is off.
"""
