"""Child processes: how they start, are called, and end.

child.py           ChildProcess: one program, started, waited for and ended; the last lines of its log
process_calls.py   calls to another process over a stream socket; progress, results and errors by name come back
process_server.py  answers them with an object's methods, in the child
authenticated.py   a connection between machines that share a secret, for calls over a network
supervisor.py      the process between: when the program or its owner ends, nothing of the program is left
plain_json.py      JSON with the standard library alone

The room needs the standard library only, because the Python that runs rollouts may have nothing else.
"""
