"""What ops of both frameworks share; imports no framework."""
