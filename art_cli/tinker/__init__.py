"""Tinker's protocol, both sides: server/, client/, and the learner, engine and teacher on a server."""
