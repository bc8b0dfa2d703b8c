"""Models in production: `art serve`, `art gateway` and `art export`.

    served_model.py      Source: the model to serve or export, resolved from files, without the YAML of its training
    loader.py            Loader: makes the engine of a source; a base model is loaded once
    served_policies.py   ServedPolicy: one model name, its engine, and the change to another checkpoint; Policies: all
    follow.py            changes a policy to each new checkpoint of its run
    admission.py         Admission: how many requests are in flight, and whether more are admitted
    request_dispatch.py  Dispatch: takes a request to its policy's engine; waits for a slot, counts, logs
    backlog.py           Backlog: chunks that are sampled and not taken yet by a slow client
    middleware.py        Middleware: keys, admission and access log, around the application
    meter.py             Meter: metrics for Prometheus
    serve_service.py     Service: all of it on a port, from the first load to the last request
    stopping.py          Stopping: a signal, the end of what is in flight, the end
    gateway/             `art gateway`: the capturing gateway alone
    merged_export.py     merged weights, and the proof that they are the policy
    card.py              the model card

A request goes: middleware -> application (chat/chat_app.py) -> dispatch -> engine.
"""
