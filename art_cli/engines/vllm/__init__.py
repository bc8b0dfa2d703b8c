"""The vLLM engine: talks HTTP to a server in another process and environment. vLLM is never imported here.

The server's prefix cache is never stale because adapter names are never reused.
"""
