"""The kernels against plain mathematics: compiled on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""
