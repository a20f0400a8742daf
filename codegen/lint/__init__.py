"""`codegen lint`: the kernels of a package, compiled for GPUs that are not there, and what came of it."""
