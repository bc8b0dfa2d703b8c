"""The vLLM engine: talks HTTP to a server in another process and environment. vLLM is never imported here.

    arguments.py      builds the server's command line and environment from configuration and model (no I/O);
                      finds vLLM and GPUs in a Python environment, for `art doctor` and for choosing an engine
    vllm_server.py    OwnServer starts a server and watches it; RunningServer connects to a running server
    guard/            middleware inside the server that requires the API key on control routes
    control.py        control calls: health, adapters, sleep, scores; Ready: whether the server answers;
                      Adapters: each step's adapter under a unique name, unloaded when idle
    chats.py          conversations containing markers as text, sent as tokens
    shared_server.py  SharedServer: the engines of one server, which is restarted if it dies
    vllm_engine.py    VllmEngine: an Engine over such a server, alone or beside other engines
    vllm_policies.py  VllmPolicies: several policies in one server, for `art backend`

The server's prefix cache is never stale because adapter names are never reused.
"""
