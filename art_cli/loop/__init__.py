"""The training loop: generate -> judge -> step -> checkpoint -> eval; and each stage alone. Begin with train.py.

Mathematics belongs to the learner and file formats to run_dir. The policy is plain data here (PolicySpec). All state is
in the run directory, so resuming means reading that directory.
"""
