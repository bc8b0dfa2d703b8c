"""Errors, log, terminal, threads, processes, signals, secrets, scratch directories. Imports no other room."""
