"""The learner whose policy is a prompt: prompt_learner.py searches, and reflection.py has a model propose texts."""
