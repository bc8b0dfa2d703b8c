"""A learner over several machines, its nodes: how they find each other, prove who they are, and are called.

node_address.py   NodePlace: one machine's place among the nodes; addresses and interfaces; the secret
node_identity.py  what must be the same on all nodes, and how two of them differ
rendezvous.py     the first node, which runs `art train`: waits for the others and admits them;
                  NodeEnd: one other node, as the first one calls it
../joined_node.py another node: `art join`

    first node                                other node
    art train -> ParallelLearner -> Workers   art join -> Workers
                   |        \\                              |
                 ranks       NodeEnd  ----- calls --->   ranks
                   \\________ torch.distributed ____________/

Every node's Workers start their own processes by torchrun's static rendezvous, whose store is on the first node. (Its
c10d rendezvous reads pickles from a port that is open to all.) A call of the learner goes to the processes of the first
node and, once, to each other node, whose Workers pass it on to theirs. So ranks are ranks wherever they are.
"""
