"""A learner across several machines (nodes): how they meet, authenticate, and are called.

node_address.py   NodeSetup: a machine's position among the nodes; addresses and interfaces; the secret
node_identity.py  settings and files that must match on all nodes, and how two nodes differ
rendezvous.py     the first node, which runs `art train`: waits for the other nodes and admits them;
                  NodeEnd: another node, as called by the first node
../joined_node.py another node: `art join`

    first node                                other node
    art train -> ParallelLearner -> Workers   art join -> Workers
                   |        \\                              |
                 ranks       NodeEnd  ----- calls --->   ranks
                   \\________ torch.distributed ____________/

Every node's Workers start their processes with torchrun's static rendezvous, whose store is on the first node. (The
c10d rendezvous reads pickles from a port open to all.) A learner call is sent to the first node's processes and, once,
to every other node, whose Workers forward it to local processes. Ranks therefore work the same on any node.
"""
