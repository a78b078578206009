# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Which packages the wheel holds; all other metadata is in pyproject.toml.

`op_builder/` and `csrc/` lie at the top of the repository, as in DeepSpeed, and ship inside the package. Builders find
their sources as the sibling folder `csrc/` of their own folder, which is right in a checkout and in the wheel.
"""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["deepspeed_hybrid", "deepspeed_hybrid.*"])
    + ["deepspeed_hybrid.op_builder", "deepspeed_hybrid.csrc"],
    package_dir={"deepspeed_hybrid.op_builder": "op_builder", "deepspeed_hybrid.csrc": "csrc"},
    package_data={
        "deepspeed_hybrid": ["py.typed", "docs/*.md"],
        "deepspeed_hybrid.csrc": ["**/*.cu", "**/*.cuh", "**/*.cpp", "**/*.h"],
    },
)
