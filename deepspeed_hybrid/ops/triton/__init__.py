# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Triton kernels and their launchers. Only these modules import Triton, which a torch for CPUs comes without."""
