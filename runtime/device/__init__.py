"""Device code that kernels share: each kernel's hash contains that of the modules it imports from here."""
