"""The vLLM engine: a server in another process and environment, called over HTTP alone. No vLLM import here.

    arguments.py      the server's command line and environment, from the configuration and the model: pure;
                      the vLLM and GPUs of a Python, for `art doctor` and for choosing an engine
    vllm_server.py    OwnServer starts one, waits until it answers, sees it end; RunningServer finds one at an address
    guard/            a middleware inside the server, which asks for the key on every route that steers it
    control.py        the calls that steer a server: health, adapters, sleep, scores; Ready: whether it answers;
                      Adapters: each step's adapter under a name of its own, unloaded when no request uses it
    chats.py          conversations whose texts hold markers, sent as tokens
    vllm_engine.py    VllmEngine: an Engine over one of these servers; when its server dies, it starts one more
    vllm_policies.py  VllmPolicies: several policies in one server, for `art backend`

A server's prefix cache is never stale because no two adapters ever have the same name in it.
"""
