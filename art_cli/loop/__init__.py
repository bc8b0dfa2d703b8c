"""The training loop: generate -> judge -> step -> checkpoint -> eval, and the same stages alone.

    choice.py     which engine and learner `auto` is on this machine, and why
    sampler.py    Sampler: engine, gateway and runner, opened together; plays scenarios with one policy
    generate.py   what a step owes, and playing it: trajectories on disk, groups judged as they complete
    failures.py   how many rollouts failed, and why
    proof.py      the proof of weights: engine and learner score the same probe
    evaluate.py   plays the evaluation scenarios and compares policies
    stages.py     the stages, each run alone
    contest.py    evaluation by a judge, against fixed reference attempts
    train.py      TrainingRun: resumes, loops, keeps checkpoints

It holds no mathematics and no file format: those are the learner's and run_dir's. What it knows at any moment it can
work out again from the run directory; that is all that resuming is.
"""
