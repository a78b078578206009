# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Rollouts for trainers of other projects. A module needs its project, and says so at import where it is missing."""
