"""A file judged into another: judged_files.py reads, session.py judges and appends."""
