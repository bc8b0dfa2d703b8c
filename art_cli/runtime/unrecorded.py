"""The header of a model call that is answered and not recorded: `X-Art-Record: no`.

Standard library only, because the Python that runs rollouts may have nothing else (rollouts/bootstrap.py).
"""

RECORD_HEADER = "X-Art-Record"
NO_RECORD = "no"
UNRECORDED = {RECORD_HEADER: NO_RECORD}
