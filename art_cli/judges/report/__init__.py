"""How far a judge can be trusted: agreement.py measures, report.py reads a scored file, text.py puts it in words."""
