"""A run's account of itself: report and findings; trackers/ and pages/."""
