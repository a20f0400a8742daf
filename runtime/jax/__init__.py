"""Code that all JAX ops share."""
