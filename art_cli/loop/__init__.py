"""The training loop: generate -> judge -> step -> checkpoint -> eval; and each stage alone.

    train.py             the loop, on a single screen
      claim_run.py       checks: configuration, data, the run directory's lock, the run's record
      open_run.py        opens judges, model, learner, policy, engine and agent -> Run
        decide.py        decides open configuration values and writes config.json
        running_learner.py, run_writer.py    learner processes; checkpoints and metrics
    engine_choice.py, gpu_fit.py    `engine: auto`; decisions by GPU memory
    references.py        checks that named files, functions and hosts exist
    record.py            config.json: the run's configuration and its changes
    warm_up.py           the supervised phase
    policy_sampler.py    Sampler: engine, gateway and runner; plays scenarios
    batches.py           each step's groups, played in waves and judged, as far ahead as the policy allows
      source_mix.py, scenario_choice.py, owed_groups.py    a step's scenarios, and its missing groups
    evaluate.py          evaluations: means, intervals, judged comparisons, gates
    stop_rules.py, startup.py, interrupts.py    pausing rules, hours and dollars; start-up time; Ctrl-C
    stages.py, stage_policy.py    the stages, each run alone
    run_plan.py          `art plan` (pilot.py, trial_update.py, prompt_plan.py)
      machines.py, calibration.py, simulation.py    the same run on other machines
    reward_hunt.py, replay.py    `art hunt`; `art prove --replay`

Mathematics belongs to the learner and file formats to run_dir. The policy is plain data here (PolicySpec). All state is
in the run directory, so resuming means reading that directory.
"""
