"""What all ops of this package share. Plain Python, copied as it is."""
