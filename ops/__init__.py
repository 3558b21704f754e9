"""What makes the method fast: Triton kernels, each beside the torch lines that define it."""
