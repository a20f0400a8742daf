"""What the PyTorch ops share."""
