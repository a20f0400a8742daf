"""The frozen model of a spec file, and the names it may use."""
