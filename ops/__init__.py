# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""What makes the method fast: Triton kernels, each beside the torch lines that define it."""
