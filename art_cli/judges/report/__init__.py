"""The trust that a judge deserves: agreement.py measures; judge_report.py reads files and reports."""
