"""Pages and pictures for people: plain data in, self-contained documents out. No network, no external scripts."""
