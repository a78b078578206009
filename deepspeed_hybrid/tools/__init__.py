# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The commands of the command line, and what they share."""
