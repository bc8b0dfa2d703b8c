"""Reward models: judges that `art reward` trains on scored groups and labels."""
