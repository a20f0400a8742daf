"""A page on this machine on which an entry is written and seen: errors, formulas, the mask, calls and kernels."""
