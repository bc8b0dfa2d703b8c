"""The training loop: generate -> judge -> step -> checkpoint -> eval, and the same stages alone.

    auto.py            which engine and learner `auto` is on this machine, and why
    dtype.py           the dtype of a run: decided once, recorded, followed
    record.py          config.json: what a run was made with, compared with a configuration
    references.py      the files, functions and hosts that a configuration names, looked up before anything runs
    policy_sampler.py  Sampler: engine, gateway and runner, opened together; plays scenarios with one policy
    owed_groups.py     what a step still owes, and playing it: trajectories on disk, groups judged as they complete
    evaluate.py        plays the evaluation scenarios and compares policies
    stages.py          the stages, each run alone
    pairwise_eval.py   evaluation by a judge, against fixed reference attempts
    interrupts.py      Ctrl-C and SIGTERM during a run
    open_train.py      opens a run: checks, the lock of its directory
    training_run.py    TrainingRun: resumes, loops, keeps checkpoints

It has no mathematics and no file format: those are the learner's and run_dir's. It knows the policy as plain data
(PolicySpec). Everything that it knows follows from the run directory, so that resuming is reading that directory.
"""
