"""Reading a spec file: YAML in, a checked `Spec` out."""
