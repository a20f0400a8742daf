"""The output of the commands `show`, `list` and `explain`, and drawings for the gallery and the studio."""
