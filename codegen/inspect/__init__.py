"""What the commands `show`, `list` and `explain` print."""
