// SPDX-License-Identifier: Apache-2.0

// DeepSpeed Team

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>

#include "decode_step.h"
#include "describe.h"

namespace ds_hybrid {
namespace {

Matrix check_matrix(const at::Tensor& tensor, const char* name, const at::Tensor& scores)
{
    const auto type = tensor.scalar_type();
    TORCH_CHECK(tensor.device() == scores.device(), "decode_step: ", name, " is on ",
                tensor.device(), ", scores are on ", scores.device());
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                "decode_step: ", name, " must be float32, bfloat16 or float16, got ", type);
    TORCH_CHECK(tensor.dim() == 2 && tensor.sizes() == scores.sizes(), "decode_step: ", name,
                " must be ", text(scores.sizes()), ", got ", text(tensor.sizes()));
    TORCH_CHECK(tensor.stride(1) == 1 || tensor.size(1) == 1, "decode_step: the columns of ", name,
                " must be adjacent, got strides ", text(tensor.strides()));
    return {tensor.const_data_ptr(), tensor.stride(0), type};
}

void check_device_and_type(const at::Tensor& tensor, const char* name, at::ScalarType type,
                           const at::Tensor& scores)
{
    TORCH_CHECK(tensor.device() == scores.device(), "decode_step: ", name, " is on ",
                tensor.device(), ", scores are on ", scores.device());
    TORCH_CHECK(tensor.scalar_type() == type, "decode_step: ", name, " must be ", type, ", got ",
                tensor.scalar_type());
}

// One value a row.
void check_vector(const at::Tensor& tensor, const char* name, at::ScalarType type,
                  const at::Tensor& scores)
{
    check_device_and_type(tensor, name, type, scores);
    TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == scores.size(0) && tensor.is_contiguous(),
                "decode_step: ", name, " must be contiguous with one value a row (",
                text(scores.size(0)), "), got ", text(tensor.sizes()), " with strides ",
                text(tensor.strides()));
}

void check_output(const at::Tensor& tensor, const char* name, at::ScalarType type,
                  const at::Tensor& scores, int64_t columns)
{
    check_device_and_type(tensor, name, type, scores);
    TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == scores.size(0) &&
                    tensor.size(1) == columns && columns > 0,
                "decode_step: ", name, " must be [", text(scores.size(0)), ", ", text(columns),
                "] with a column to write to, got ", text(tensor.sizes()));
    TORCH_CHECK((tensor.stride(1) == 1 || columns == 1) &&
                    (tensor.stride(0) >= columns || tensor.size(0) == 1),
                "decode_step: ", name, " must have adjacent columns and rows apart, got strides ",
                text(tensor.strides()));
}

void decode_step(const at::Tensor& scores, const std::optional<at::Tensor>& raw_logits,
                 const std::optional<at::Tensor>& temperature, const at::Tensor& seed,
                 const at::Tensor& request, const at::Tensor& sample, const at::Tensor& limit,
                 const at::Tensor& stop_ids, const at::Tensor& token, const at::Tensor& position,
                 const at::Tensor& length, const at::Tensor& parked, const at::Tensor& finish,
                 const at::Tensor& tokens, const at::Tensor& logprobs, bool sampled)
{
    TORCH_CHECK(scores.is_cuda(), "decode_step: scores must be on a CUDA device, got ",
                scores.device());
    Arguments args{};
    args.scores = check_matrix(scores, "scores", scores);
    if (raw_logits) args.raw_logits = check_matrix(*raw_logits, "raw_logits", scores);
    if (temperature) {
        check_vector(*temperature, "temperature", at::kFloat, scores);
        args.temperature = temperature->const_data_ptr<float>();
    }
    check_vector(seed, "seed", at::kLong, scores);
    check_vector(request, "request", at::kLong, scores);
    check_vector(sample, "sample", at::kLong, scores);
    check_vector(limit, "limit", at::kLong, scores);
    check_vector(token, "token", at::kLong, scores);
    check_vector(position, "position", at::kLong, scores);
    check_vector(length, "length", at::kLong, scores);
    check_vector(parked, "parked", at::kBool, scores);
    check_vector(finish, "finish", at::kByte, scores);
    check_output(tokens, "tokens", at::kLong, scores, tokens.dim() == 2 ? tokens.size(1) : 0);
    check_output(logprobs, "logprobs", at::kFloat, scores, tokens.size(1));
    check_device_and_type(stop_ids, "stop_ids", at::kLong, scores);
    TORCH_CHECK(stop_ids.dim() == 1 && stop_ids.is_contiguous(),
                "decode_step: stop_ids must be one contiguous row, got ", text(stop_ids.sizes()));
    const int64_t rows = scores.size(0), vocab = scores.size(1);
    TORCH_CHECK(vocab > 0 && vocab <= std::numeric_limits<int>::max() - 2 * kChunk,
                "decode_step: the vocabulary must have 1 to 2**31 entries or so, got ", vocab);
    if (rows == 0) return;

    const c10::cuda::CUDAGuard guard(scores.device());
    args.rows = static_cast<int>(rows);
    args.vocab = static_cast<int>(vocab);
    args.chunks = (args.vocab + kChunk - 1) / kChunk;
    args.stops = static_cast<int>(stop_ids.numel());
    args.columns = tokens.size(1);
    args.tokens_stride = tokens.stride(0);
    args.logprobs_stride = logprobs.stride(0);
    args.seed = seed.const_data_ptr<int64_t>();
    args.request = request.const_data_ptr<int64_t>();
    args.sample = sample.const_data_ptr<int64_t>();
    args.limit = limit.const_data_ptr<int64_t>();
    args.stop_ids = stop_ids.const_data_ptr<int64_t>();
    args.token = token.mutable_data_ptr<int64_t>();
    args.position = position.mutable_data_ptr<int64_t>();
    args.length = length.mutable_data_ptr<int64_t>();
    args.parked = parked.mutable_data_ptr<bool>();
    args.finish = finish.mutable_data_ptr<uint8_t>();
    args.tokens = tokens.mutable_data_ptr<int64_t>();
    args.logprobs = logprobs.mutable_data_ptr<float>();
    const at::Tensor workspace = at::empty(
        {(raw_logits ? 2 : 1) * rows * args.chunks * static_cast<int64_t>(sizeof(Partial))},
        scores.options().dtype(at::kByte));
    args.partials = reinterpret_cast<Partial*>(workspace.mutable_data_ptr());

    launch_decode_step(args, sampled, c10::cuda::getCurrentCUDAStream());
}

}  // namespace
}  // namespace ds_hybrid

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("decode_step", &ds_hybrid::decode_step,
          "Choose the next token of every row that is not parked and record it (CUDA)");
}
