"""One policy step: scored groups become samples, then gradients, and the step reports its metrics.

policy_step.py      the step itself, shared by local weights and weights on a server
  step_samples.py     groups -> samples, divided into optimizer steps
  gradient.py         samples -> `.grad`, for local weights
  step_statistics.py  counts and means, accumulated pack by pack
  training_record.py  per-token training numbers, if the run records them
"""
