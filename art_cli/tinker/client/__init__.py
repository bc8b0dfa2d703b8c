"""Tinker protocol client. A remote server stores the policy's weights, trains and samples.

    remote_server.py      RemoteServer: address, key and capabilities, through plain HTTP
                          RemoteSession: a session of the official SDK with a deadline for every wait
    remote_checkpoint.py  RemoteCheckpoint: server paths in a checkpoint directory, and adapter download

tinker/tinker_engine.py samples through it, and tinker/tinker_learner.py trains through it. `art backend`
(tinker/server/) is such a server. The SDK is imported when a connection opens. Its telemetry is off.
"""
