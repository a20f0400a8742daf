"""What the chips allow: tiles, memory, registers."""
