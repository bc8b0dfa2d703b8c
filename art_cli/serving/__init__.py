"""Checkpoints in production: `art serve` and `art export`.

    source.py      Source: what is served, found out from a checkpoint alone, without the YAML it was trained with
    loader.py      Loader: makes the engine of a source; a base model is loaded once
    policies.py    ServedPolicy: one model name, its engine, and the change to another checkpoint; Policies: all of them
    follow.py      changes a policy to each new checkpoint of its run
    admission.py   Admission: how many requests are in the house, and whether more may come in
    desk.py        Desk: takes a request to its policy; waits for a place, counts, logs
    keys.py        Keys: who may ask
    pages.py       keeps web pages out of a server without a key
    door.py        Door: what stands before the application: keys, admission, the access log
    meter.py       Meter: numbers for Prometheus
    service.py     Service: all of it on a port, from the first load to the last request
    export.py      merged weights, and the proof that they are the policy
    card.py        the model card

A request goes: door -> application (chat/app.py) -> desk -> policies -> engine.
"""
