"""Packs: token rows in which samples share common tokens, plus the matching attention."""
