"""RULER, a judge that compares: judge.py says how a group goes through its files."""
