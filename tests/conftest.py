"""Set-up of every test session."""

import os

# Test models are far too small for a second thread, and threads that wait for a busy core cost twenty times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
