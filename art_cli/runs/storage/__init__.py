"""Runs in an object store. A run is mirrored while it trains, and another machine can resume it.

    s3://bucket/prefix/<name>/      same files and names as in runs/<name>
      checkpoints/step_0004/        manifest.json is uploaded last and completes the checkpoint
      lease/000003.json             identifies the machine using the run; the highest number is valid

The local run directory remains authoritative and keeps all guarantees. The training loop never reads from the store, so
a missing or failing store does not affect training.
"""
