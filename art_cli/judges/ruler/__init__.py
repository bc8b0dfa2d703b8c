"""RULER, a judge that compares: ruler_judge.py has the way of a group through its files."""
