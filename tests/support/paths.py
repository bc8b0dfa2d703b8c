"""Directories that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
LETTERS = TESTS / "letters"  # the smallest project that trains
CLIENTS = TESTS / "clients"  # what other SDKs do with a server
TICTACTOE = ROOT / "recipes" / "tictactoe"
