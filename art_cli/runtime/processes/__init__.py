"""Child processes: starting, calling and ending them.

These modules only use the standard library, because the Python that runs rollouts may lack other packages.
"""
