"""The embedded engine: samples many requests together, with torch in this process, from the learner's own weights."""
