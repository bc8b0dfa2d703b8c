"""A run's files: records, run directory, manifest, checkpoints, durable writes, history, and storage/."""
