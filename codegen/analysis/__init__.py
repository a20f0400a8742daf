"""What follows from a mask or a score: schedules, mask runs, gradients, call modes."""
