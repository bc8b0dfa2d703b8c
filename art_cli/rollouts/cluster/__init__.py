"""Rollouts on the nodes of a Ray cluster. Scheduling, retries, limits and counting stay with the runner.

    art's own process      cluster_rollout.py  ClusterRollout: what the runner plays with
      its child process    ray_driver.py       RayRollout: Ray's driver; places one actor for each process of rollouts
        a node             ray_node.py         NodeActor: plays attempts with ProcessRollout or CommandRollout
          its child        ../process_worker.py, as without a cluster

The driver also sends copies of the config's directory and of this package to the nodes (ray_driver.py).

Ray ends its driver's process when it loses the cluster, writes to its standard error, and reads pickles that come from
the nodes. So the driver is a separate process, and its messages are JSON, checked whole. All but cluster_rollout.py
needs the standard library only, and Ray.
"""
