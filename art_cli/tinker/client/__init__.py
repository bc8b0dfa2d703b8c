"""The client of the Tinker protocol: a server elsewhere that holds the policy's weights, trains and samples them.

    remote_server.py      RemoteServer: its address, key and capabilities, by plain HTTP
                          RemoteSession: a session of the official SDK, in which every wait has a deadline
    remote_checkpoint.py  RemoteCheckpoint: a server's paths in a checkpoint directory, and the download of an adapter

tinker/tinker_engine.py samples through it and tinker/tinker_learner.py trains through it. `art backend`
(tinker/server/) is such a server. The SDK is imported when a connection is opened, and its telemetry is off.
"""
