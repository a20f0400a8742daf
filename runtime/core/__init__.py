"""What the ops of every framework share. No framework is imported."""
