"""A file judged into another: judged_files.py reads, scored.py appends, session.py does both."""
