"""`codegen lint`: compiles the kernels of a package for chips that need not be present, and judges their resources."""
