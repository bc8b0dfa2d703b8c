"""The trust that a judge deserves: agreement.py and noise.py measure; judge_report.py reads files."""
