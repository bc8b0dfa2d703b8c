"""The training loop: generate -> judge -> step -> checkpoint -> eval, and the same stages alone.

    train.py             the loop, which reads in one screen
      claim_run.py       checks: configuration, data, the lock of the run's directory, the run's record
      open_run.py        opens the parts: judges, model, learner, first policy, engine, agent -> Run
        decide.py        decides what the configuration leaves open, once, and writes config.json
    engine_choice.py     the choice of `engine: auto`, by the facts of this machine
    references.py        files, functions and hosts that a configuration names, looked up before anything runs
    record.py            config.json: what a run was made with, compared with a configuration
    warm_up.py           the supervised phase before the first step
    policy_sampler.py    Sampler: engine, gateway and runner, opened together; plays scenarios with one policy
    batches.py           each step's groups: which, played in waves, and judged as far ahead as the policy allows
      scenario_choice.py, owed_groups.py    the scenarios of a step, and its groups that are still missing
    evaluate.py          evaluations: means and intervals, a judge's comparisons, gates
    stop_rules.py, startup.py, interrupts.py    rules that pause, hours and dollars, start, Ctrl-C
    stages.py, stage_policy.py    the stages of the loop, each run alone
    run_plan.py          the plan of a run: its first step, then pilot steps (pilot.py, trial_update.py)

It has no mathematics and no file format: those are the learner's and run_dir's. The policy is plain data here
(PolicySpec). Everything follows from the run directory, so that resuming is reading that directory.
"""
