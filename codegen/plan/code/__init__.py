"""The code of kernels and of calls: typed trees, what lowers expressions to them, what prints them."""
