"""A file judged into another: source.py reads what can be judged, scored.py appends what is, session.py does both."""
