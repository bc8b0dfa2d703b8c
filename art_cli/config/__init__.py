"""A run's configuration, composed from YAML and overrides, checked by pydantic. No module imports torch."""
