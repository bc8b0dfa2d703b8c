"""How far a judge can be trusted: agreement.py and noise.py measure; judge_report.py reads files."""
