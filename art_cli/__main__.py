"""`python -m art_cli` is `art`."""

from art_cli.cli import main

main()
