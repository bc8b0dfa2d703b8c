"""`art improve`: nights that learn from live traffic, and stop or take back what does not help.

files of art gateway -> scenarios (traffic) -> training from the promoted or a promising checkpoint -> gates
    -> canary: some conversations get the candidate -> feedback decides (canary_test) -> promoted or rolled back

runs/NAME/served.json               what answers now (runs/served.py)
runs/NAME/nights/night_0003/
    night.json                      the night's report, which also says what is done
    scenarios.jsonl, held_out.jsonl from traffic, and the run's own for rehearsal
    run/                            a run, forked from the checkpoint that training starts from
    gates/                          the attempts of both policies
"""
