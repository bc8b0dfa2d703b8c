"""Models in production: `art serve`, `art gateway` and `art export`.

    served_model.py      Source: the model to serve or export, resolved from files, without the YAML of its training
    served_policies.py   ServedPolicy: one model name, its engine, and the change to another checkpoint; Policies: all
                         Loader: makes the engine of a source; a base model is loaded once
    middleware.py        Middleware: keys, admission and access log, around the application
                         Admission: the requests in flight, and whether more are admitted; Meter: Prometheus
    serve_service.py     Service: all of it on a port, from the first load to the last request
                         Dispatch: takes a request to its policy's engine; waits for a slot, counts, logs
                         Backlog: chunks that are sampled and not taken yet by a slow client
    gateway/             `art gateway`: the capturing gateway alone
    merged_export.py     merged weights, the proof that they are the policy, and the model card

A request goes: middleware -> application (chat/chat_app.py) -> dispatch -> engine.
"""
