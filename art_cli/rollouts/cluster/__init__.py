"""Rollouts on the nodes of a Ray cluster. The runner remains responsible for scheduling, retries, limits, and counts.

    training process         cluster_rollout.py  ClusterRollout: the runner's Rollout
      child process          ray_driver.py       RayRollout: Ray's driver; places one actor per rollout process
        node                 ray_node.py         NodeActor: plays attempts with ProcessRollout or CommandRollout
          child process      ../process_worker.py, the same as without a cluster

The driver also copies the config's directory and this package to the nodes (ray_driver.py).

The driver is a separate process because Ray exits its driver's process when it loses the cluster, writes to its stderr,
and loads pickles from the nodes. The driver's messages are fully validated JSON. All modules except cluster_rollout.py
need only the standard library and Ray.
"""
