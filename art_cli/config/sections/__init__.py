"""The sections of a configuration, a file for each: keys, defaults and what they mean."""
