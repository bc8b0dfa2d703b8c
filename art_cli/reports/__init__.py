"""A run's account of itself: report, findings, diagnoses; trackers/ and pages/."""
