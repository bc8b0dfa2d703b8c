"""Models in production: `art serve`, `art gateway` and `art export`.

    served_model.py      Source: the model to serve or export, resolved from files without the training YAML
    served_policies.py   ServedPolicy: a model name with its engine and checkpoint changes; Policies: all policies
                         Loader: creates the engine for a source and loads each base model once
    middleware.py        Middleware: API keys, admission and access log around the application
                         Admission: counts running requests and decides on new ones; Meter: Prometheus metrics
    serve_service.py     Service: everything on a port, from the first load to the last request
    dispatch.py          Dispatch: sends a request to its policy's engine; waits for a slot, counts tokens, logs
    backlog.py           Backlog: sampled chunks that a slow client has not read yet
    gateway/             `art gateway`: the standalone capturing gateway
    merged_export.py     merged weights, the proof that they equal the policy, and the model card
    gguf_export.py       GGUF files for llama.cpp and Ollama, with the same proof

A request passes: middleware -> application (chat/chat_app.py) -> dispatch -> engine.
"""
