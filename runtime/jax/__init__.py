"""What the JAX ops share."""
