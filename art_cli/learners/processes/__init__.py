"""A learner across several processes, on one machine or on several nodes."""
