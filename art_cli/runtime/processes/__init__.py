"""Child processes: starting, calling and ending them.

child.py           ChildProcess: starts, awaits and ends a program; reads its log
process_calls.py   calls to another process over a stream socket; returns progress, results and errors by name
process_server.py  answers calls with an object's methods, in the child
authenticated.py   a network connection between machines that share a secret
supervisor.py      intermediate process: cleans up the process tree when the program or the owner dies
plain_json.py      JSON with the standard library alone

These modules only use the standard library, because the Python that runs rollouts may lack other packages.
"""
