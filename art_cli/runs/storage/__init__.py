"""Runs in an object store: what a run has is kept there as it goes, and another machine goes on from it.

    s3://bucket/prefix/<name>/      the same files as runs/<name>, under the same names
      checkpoints/step_0004/        its files first and manifest.json last, which makes it whole
      lease/000003.json             which machine works on the run; the highest number holds

object_store.py  the objects below one address, through fsspec, and the lease of the machine that works on a run
mirror.py        uploads what a run has, beside the loop
fetch.py         downloads a run: to go on with it, or to look at it

The run itself lives in its local directory, and all of its own promises are kept there. Nothing here is read by the
loop: without a store, or with one that fails, it trains in the same way.
"""
