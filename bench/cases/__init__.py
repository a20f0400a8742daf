"""What is timed: variants at one size, with the peers they are compared with."""
