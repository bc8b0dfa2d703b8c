"""RULER, a judge that compares: ruler_judge.py says how a group goes through its files."""
