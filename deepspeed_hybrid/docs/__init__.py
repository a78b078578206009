# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The guide: pages for users, which also read well by themselves.

.. include:: from_vllm.md

.. include:: options.md

.. include:: fallbacks.md

.. include:: tensor_parallel.md

.. include:: speculation.md
"""
