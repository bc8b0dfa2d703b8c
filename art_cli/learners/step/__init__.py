"""One policy step: scored groups become samples, their gradient, and the numbers that the step reports.

policy_step.py      the step itself, the same for weights here and on a server
  step_samples.py     groups -> samples, divided into optimizer steps
  gradient.py         samples -> `.grad`, for weights here
  step_statistics.py  counts and means, added up pack by pack
  training_record.py  numbers of each trained token, if the run records them
"""
