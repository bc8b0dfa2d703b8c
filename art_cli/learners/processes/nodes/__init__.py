"""A learner across several machines (nodes): how they meet, authenticate, and are called.

    first node                                other node
    art train -> ParallelLearner -> Workers   art join -> Workers
                   |        \\                              |
                 ranks       NodeEnd  ----- calls --->   ranks
                   \\________ torch.distributed ____________/

Every node's Workers start their processes with torchrun's static rendezvous, whose store is on the first node. (The
c10d rendezvous reads pickles from a port open to all.) A learner call is sent to the first node's processes and, once,
to every other node, whose Workers forward it to local processes. Ranks therefore work the same on any node.
"""
