"""The learner whose policy is a prompt: prompt_learner.py searches, and reflection.py asks a model for new texts."""
