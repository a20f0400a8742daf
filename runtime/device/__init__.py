"""Device code that kernels share. A kernel's hash covers each definition that it uses from here."""
