// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace ds_hybrid {

// Numbers as text for error messages, without a stream: where a toolchain links its own libstdc++
// into an extension, a stream that PyTorch's libstdc++ has set up crashes at the first number.
inline std::string text(int64_t number) { return std::to_string(number); }

inline std::string text(at::IntArrayRef numbers)
{
    std::string joined = "[";
    for (size_t i = 0; i < numbers.size(); ++i) {
        joined += (i ? ", " : "") + std::to_string(numbers[i]);
    }
    return joined + "]";
}

}  // namespace ds_hybrid
