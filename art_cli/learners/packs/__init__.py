"""Packs: rows of tokens in which samples share what they have in common, and the attention over them."""
