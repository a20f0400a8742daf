"""A page on this machine on which an entry is edited; it shows errors, formulas, the mask, calls and kernels."""
