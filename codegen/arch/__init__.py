"""The limits of the chips, and the rules and defaults for tiles."""
