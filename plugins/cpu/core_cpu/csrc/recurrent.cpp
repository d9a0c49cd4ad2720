// `core_cpu::causal_conv1d_update`, `gated_delta_rule` and `selective_state_update`: steps of recurrent layers on states
// in slots, token by token along each sequence.

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "recurrent.h"
#include "sequences.h"

namespace core_cpu {
namespace {

// Features of a head that are computed in one go where each has a step of its own.
constexpr int64_t FEATURES = 64;

}  // namespace

// As the canonical op has it, for calls that the condition in ops/recurrent.py lets pass; so are the others.
Tensor causal_conv1d_update(const Tensor& x, const Tensor& states, const Tensor& weight, const Optional& bias,
                            const Optional& slots, const Optional& kept, const Optional& query_starts, bool silu) {
  const int64_t rows = x.size(0), channels = x.size(1), length = states.size(2), taps = weight.size(1);
  const Tensor in = in_rows(x), factors = weight.contiguous();
  const Optional added = in_run(bias), read = in_run(slots), written = in_run(kept), starts = in_run(query_starts);
  const Sequences places(read, written, starts, states.size(0), rows, "core::causal_conv1d_update");
  Tensor out = results({rows, channels}, x.scalar_type(), places);
  const int64_t blocks = (channels + CHANNELS - 1) / CHANNELS;
  with_dtype(x.scalar_type(), "core_cpu::causal_conv1d_update", [&]<typename T>(T) {
    const auto run = [&]<typename W>(W) {
      T* data = states.mutable_data_ptr<T>();
      at::parallel_for(0, places.count * blocks, grain(CHANNELS * length), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = i % blocks * CHANNELS, count = std::min(CHANNELS, channels - first);
          const auto step = [&](int64_t row, const T* old, T* to) {
            Convolution<T, W> part{head<T>(in, row, 0) + first,
                                   old,
                                   to,
                                   factors.const_data_ptr<W>() + first * taps,
                                   added ? added->const_data_ptr<W>() + first : nullptr,
                                   out.mutable_data_ptr<T>() + row * channels + first,
                                   count};
            part.run(length, taps, silu);
          };
          places.along(i / blocks, data, states.stride(0), first * length, count * length, step);
        }
      });
    };
    if (weight.scalar_type() == x.scalar_type()) {
      run(T());
    } else {
      run(0.f);
    }
  });
  return out;
}

Tensor gated_delta_rule(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                        const Tensor& beta, const Tensor& states, double scale, double norm_eps, const Optional& slots,
                        const Optional& kept, const Optional& query_starts) {
  const int64_t rows = value.size(0), heads = value.size(1), width = value.size(2), depth = key.size(2);
  const int64_t group = heads / std::max<int64_t>(key.size(1), 1);
  const Tensor queries = in_rows(query), keys = in_rows(key), values = in_rows(value);
  const Tensor fading = decay.dim() == 3 ? in_rows(decay) : decay;
  const Optional read = in_run(slots), written = in_run(kept), starts = in_run(query_starts);
  const Sequences places(read, written, starts, states.size(0), rows, "core::gated_delta_rule");
  const Numbers rates(beta), fades(decay);
  Tensor out = results({rows, heads, width}, value.scalar_type(), places);
  float* data = states.mutable_data_ptr<float>();
  with_dtype(value.scalar_type(), "core_cpu::gated_delta_rule", [&]<typename T>(T) {
    at::parallel_for(0, places.count * heads, grain(depth * width), [&](int64_t begin, int64_t end) {
      DeltaRule rule(depth, width);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t h = i % heads;
        const auto step = [&](int64_t row, const float* old, float* to) {
          rule.take(head<T>(queries, row, h / group), head<T>(keys, row, h / group), head<T>(values, row, h),
                    static_cast<float>(scale), static_cast<float>(norm_eps));
          if (decay.dim() == 3) {
            rule.fade(head<float>(fading, row, h));
          } else {
            rule.fade(fades.at(row, h));
          }
          rule.run(old, to, rates.at(row, h), out.mutable_data_ptr<T>() + (row * heads + h) * width);
        };
        places.along(i / heads, data, states.stride(0), h * depth * width, depth * width, step);
      }
    });
  });
  return out;
}

namespace {

// The steps of a state space: of each head, or of each feature.
struct Steps {
  Numbers dt;
  std::optional<Numbers> bias;
  bool softplus;
  float least, most;
  const bool* bounded;

  Steps(const Tensor& dt, const Optional& bias, bool softplus, double least, double most, const Optional& bounded)
      : dt(dt), bias(bias ? std::optional(Numbers(*bias)) : std::nullopt), softplus(softplus),
        least(static_cast<float>(least)), most(static_cast<float>(most)),
        bounded(bounded ? bounded->const_data_ptr<bool>() : nullptr) {}

  // bias: that of the head or feature.
  float at(int64_t row, int64_t head, int64_t feature, float bias) const {
    float step = dt.at(row, head, feature) + bias;
    step = softplus && step <= 20.f ? std::log1p(std::exp(step)) : step;
    if (bounded == nullptr || bounded[row]) {
      step = least > 0.f ? std::max(step, least) : step;
      step = most > 0.f ? std::min(step, most) : step;
    }
    return step;
  }
};

// The arguments of a call that both of its forms read.
struct SpaceCall {
  const Tensor &x, &B, &C;
  const Steps& steps;
  const Sequences& places;
  float* states;
  int64_t slot;
  Tensor& out;
};

void along_heads(const SpaceCall& call, const Tensor& A, const Optional& D) {
  const int64_t heads = call.x.size(1), features = call.x.size(2), size = call.B.size(2);
  const int64_t group = heads / std::max<int64_t>(call.B.size(1), 1);
  const Numbers rates(A);
  const auto skips = D ? std::optional(Numbers(*D)) : std::nullopt;
  with_dtype(call.x.scalar_type(), "core_cpu::selective_state_update", [&]<typename T>(T) {
    at::parallel_for(0, call.places.count * heads, grain(features * size), [&](int64_t begin, int64_t end) {
      StateSpace space(features, size);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t h = i % heads;
        const float bias = call.steps.bias ? call.steps.bias->at(0, h) : 0.f;
        const auto move = [&](int64_t row, const float* old, float* to) {
          const float step = call.steps.at(row, h, 0, bias);
          space.take(head<T>(call.x, row, h), head<T>(call.B, row, h / group), head<T>(call.C, row, h / group));
          space.run(old, to, step, std::exp(step * rates.at(0, h)), skips ? skips->at(0, h) : 0.f,
                    call.out.mutable_data_ptr<T>() + (row * heads + h) * features);
        };
        call.places.along(i / heads, call.states, call.slot, h * features * size, features * size, move);
      }
    });
  });
}

void along_features(const SpaceCall& call, const Tensor& A, const Optional& D) {
  const int64_t heads = call.x.size(1), width = call.x.size(2), size = call.B.size(2);
  const int64_t group = heads / std::max<int64_t>(call.B.size(1), 1), blocks = (width + FEATURES - 1) / FEATURES;
  const Tensor rates = A.to(at::kFloat).contiguous();
  const auto skips = D ? std::optional(D->to(at::kFloat).contiguous()) : std::nullopt;
  with_dtype(call.x.scalar_type(), "core_cpu::selective_state_update", [&]<typename T>(T) {
    at::parallel_for(0, call.places.count * heads * blocks, grain(FEATURES * size), [&](int64_t begin, int64_t end) {
      float steps[FEATURES], biases[FEATURES];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t h = i / blocks % heads, first = i % blocks * FEATURES, count = std::min(FEATURES, width - first);
        const int64_t at = h * width + first;
        StateSpace space(count, size);
        for (int64_t p = 0; p < count; ++p) {
          biases[p] = call.steps.bias ? call.steps.bias->at(h, first + p) : 0.f;
        }
        const auto move = [&](int64_t row, const float* old, float* to) {
          for (int64_t p = 0; p < count; ++p) {
            steps[p] = call.steps.at(row, h, first + p, biases[p]);
          }
          space.take(head<T>(call.x, row, h) + first, head<T>(call.B, row, h / group),
                     head<T>(call.C, row, h / group));
          space.run(old, to, steps, rates.const_data_ptr<float>() + at * size,
                    skips ? skips->const_data_ptr<float>() + at : nullptr,
                    call.out.mutable_data_ptr<T>() + row * heads * width + at);
        };
        call.places.along(i / (blocks * heads), call.states, call.slot, at * size, count * size, move);
      }
    });
  });
}

}  // namespace

Tensor selective_state_update(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
                              const Tensor& states, const Optional& D, const Optional& dt_bias, bool dt_softplus,
                              double dt_min, double dt_max, const Optional& bounded, const Optional& slots,
                              const Optional& kept, const Optional& query_starts) {
  const Tensor in = in_rows(x), keys = in_rows(B), queries = in_rows(C);
  const Optional read = in_run(slots), written = in_run(kept), starts = in_run(query_starts), limited = in_run(bounded);
  const Sequences places(read, written, starts, states.size(0), x.size(0), "core::selective_state_update");
  const Steps steps(dt, dt_bias, dt_softplus, dt_min, dt_max, limited);
  Tensor out = results(x.sizes(), x.scalar_type(), places);
  const SpaceCall call{in, keys, queries, steps, places, states.mutable_data_ptr<float>(), states.stride(0), out};
  (A.dim() == 3 ? along_features : along_heads)(call, A, D);
  return out;
}

CORE_CPU_DIRECT(causal_conv1d_update, causal_conv1d_update)
CORE_CPU_DIRECT(gated_delta_rule, gated_delta_rule)
CORE_CPU_DIRECT(selective_state_update, selective_state_update)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("causal_conv1d_update", Calls<causal_conv1d_update>::boxed);
  m.impl("gated_delta_rule", Calls<gated_delta_rule>::boxed);
  m.impl("selective_state_update", Calls<selective_state_update>::boxed);
}

}  // namespace core_cpu
