"""RULER, a judge that compares attempts; ruler_judge.py describes the data flow."""
