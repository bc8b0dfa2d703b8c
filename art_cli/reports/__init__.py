"""Reports on a run: report and findings; trackers/ and pages/."""
