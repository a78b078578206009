# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""`python -m deepspeed_hybrid` is the command `deepspeed-hybrid`."""

import sys

from deepspeed_hybrid.cli import main

if __name__ == "__main__":
    sys.exit(main())
