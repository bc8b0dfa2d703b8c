"""How far a judge can be trusted: agreement.py and noise.py measure, report.py reads files, text.py writes words."""
