"""Every figure that is claimed, as a command; README.md lists the commands."""
