// `core_cpu::attention`: the kernel of `core::attention` for caches of fp32, bf16 and fp16. And the same as
// `core_cpu::attention_alike`, where results for a token do not depend on other sequences, nor on which tokens are new.

#include <ATen/Parallel.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "binding.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Multiplications that are worth another thread, and positions that are worth a share of their own.
constexpr int64_t WORK = 1 << 16;
constexpr int64_t SHORTEST_SPLIT = 4 * TILE;

std::vector<int64_t> numbers_of(const Tensor& index) {
  const Tensor run = index.contiguous();
  if (run.scalar_type() == at::kInt) {
    return {run.const_data_ptr<int32_t>(), run.const_data_ptr<int32_t>() + run.numel()};
  }
  return {run.const_data_ptr<int64_t>(), run.const_data_ptr<int64_t>() + run.numel()};
}

Tensor in_rows(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

// Run `work` for 0 .. count - 1, whoever is free taking the next; cost: multiplications of all.
template <typename Work>
void share_out(int64_t count, int64_t cost, const Work& work) {
  const int64_t threads = std::min({static_cast<int64_t>(at::get_num_threads()), count, cost / WORK + 1});
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) {
      work(i);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) {
      work(i);
    }
  });
}

template <typename T>
Cache<T> cache_of(const Tensor& cache) {
  return {cache.const_data_ptr<T>(), cache.size(0), cache.size(1), cache.stride(0), cache.stride(1), cache.stride(2),
          cache.size(3)};
}

// Write new (num_tokens, K, size) into the cache at the slots.
template <typename T>
void write_cache(const Tensor& fresh, const Tensor& cache, const int64_t* slots, int64_t num_tokens) {
  const Cache<T> at = cache_of<T>(cache);
  T* data = cache.mutable_data_ptr<T>();
  const T* from = fresh.const_data_ptr<T>();
  const int64_t num_heads = fresh.size(1), token = fresh.stride(0), head = fresh.stride(1);
  const int64_t per_thread = std::max<int64_t>(WORK / std::max<int64_t>(num_heads * at.size, 1), 1);
  at::parallel_for(0, num_tokens, per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t block = slots[t] / at.page, offset = slots[t] % at.page;
      TORCH_CHECK_INDEX(slots[t] >= 0 && block < at.num_blocks, "core::attention: slot ", slots[t], " of ",
                        at.num_blocks * at.page);
      T* to = data + block * at.stride_block + offset * at.stride_position;
      for (int64_t h = 0; h < num_heads; ++h) {
        std::memcpy(to + h * at.stride_head, from + t * token + h * head, at.size * sizeof(T));
      }
    }
  });
}

struct Plan {
  std::vector<Share> shares;
  int64_t num_blocks = 0;
  int64_t cost = 0;
};

// Cut the work into shares: blocks of rows of each key/value head, and where these are fewer than threads, parts of
// their positions. The costliest share of a prompt, its last rows, comes first.
template <typename T>
Plan make_plan(const Call<T>& call, int64_t num_kv_heads, const std::vector<int64_t>& lens,
               const std::vector<int64_t>& starts) {
  Plan plan;
  for (size_t s = 0; s < lens.size(); ++s) {
    const int64_t num_new = starts[s + 1] - starts[s], num_rows = num_new * call.group;
    for (int64_t last = num_rows; last > 0; last -= MAX_ROWS) {
      const int64_t first = std::max<int64_t>(last - MAX_ROWS, 0);
      const int64_t start = visible(call, lens[s], num_new, first).start;
      const int64_t stop = visible(call, lens[s], num_new, last - 1).stop;
      plan.cost += num_kv_heads * (last - first) * (stop - start) * (call.keys.size + call.values.size);
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        plan.shares.push_back({static_cast<int64_t>(s), head, starts[s], first, last - first, lens[s], num_new, start,
                               stop, plan.num_blocks++, 0, 1});
      }
    }
  }
  const int64_t threads = at::get_num_threads();
  if (call.alike || plan.num_blocks == 0 || plan.num_blocks >= threads || plan.cost < WORK) {
    return plan;
  }
  std::vector<Share> parts;
  for (const Share& whole : plan.shares) {
    const int64_t positions = whole.stop - whole.start;
    const int64_t splits = std::clamp<int64_t>(positions / SHORTEST_SPLIT, 1, 2 * threads / plan.num_blocks);
    const int64_t each = ((positions + splits - 1) / splits + TILE - 1) / TILE * TILE;
    const int64_t num_splits = std::max<int64_t>((positions + each - 1) / std::max<int64_t>(each, 1), 1);
    for (int64_t i = 0; i < num_splits; ++i) {
      Share part = whole;
      part.split = i, part.num_splits = num_splits;
      part.start = whole.start + i * each, part.stop = std::min(part.start + each, whole.stop);
      parts.push_back(part);
    }
  }
  plan.shares = std::move(parts);
  return plan;
}

// Run the shares; who finishes a block of rows last writes it.
template <typename T>
void attend(const Call<T>& call, const Plan& plan) {
  const int64_t width = padded(call.values.size), size = MAX_ROWS * width, count = plan.shares.size();
  const bool split = count > plan.num_blocks;
  std::vector<float> sums(split ? count * size : 0);
  std::vector<Softmax> stats(split ? count * MAX_ROWS : 0);
  std::vector<Partial> partials(split ? count : 0);
  for (size_t i = 0; i < partials.size(); ++i) {
    partials[i] = {sums.data() + i * size, stats.data() + i * MAX_ROWS};
  }
  std::unique_ptr<std::atomic<int64_t>[]> arrived(split ? new std::atomic<int64_t>[plan.num_blocks]() : nullptr);
  share_out(count, plan.cost, [&](int64_t i) {
    thread_local Scratch scratch;
    const Share& share = plan.shares[i];
    const int64_t own = Tiles<T, false>::scratch_size(call);
    float* memory = scratch.take(own + size + 2 * MAX_ROWS);
    const Partial partial =
        split ? partials[i] : Partial{memory + own, reinterpret_cast<Softmax*>(memory + own + size)};
    const int64_t next = std::min<int64_t>(i + at::get_num_threads(), count - 1);
    if (call.alike) {
      Tiles<T, true>(call, share, plan.shares[next], memory).run(partial);
    } else {
      Tiles<T, false>(call, share, plan.shares[next], memory).run(partial);
    }
    if (!split) {
      write_rows(call, share, &partial);
    } else if (++arrived[share.block] == share.num_splits) {
      write_rows(call, share, &partials[i - share.split]);
    }
  });
}

void check_lengths(const Tensor& query, const Tensor& key_cache, const Tensor& block_table,
                   const std::vector<int64_t>& lens, const std::vector<int64_t>& starts) {
  TORCH_CHECK(starts.size() == lens.size() + 1, "core::attention: ", starts.size(), " query_starts for ", lens.size(),
              " sequences");
  TORCH_CHECK(starts[0] >= 0 && starts.back() <= query.size(0), "core::attention: query_starts from ", starts[0],
              " to ", starts.back(), " of ", query.size(0), " tokens");
  const int64_t longest = block_table.size(1) * key_cache.size(1);
  for (size_t s = 0; s < lens.size(); ++s) {
    TORCH_CHECK(starts[s] <= starts[s + 1], "core::attention: query_starts fall at sequence ", s);
    TORCH_CHECK(starts[s + 1] == starts[s] || (lens[s] >= starts[s + 1] - starts[s] && lens[s] <= longest),
                "core::attention: sequence ", s, " has ", lens[s], " positions, of which ", starts[s + 1] - starts[s],
                " are new; its blocks hold ", longest);
  }
}

Tensor compute(bool alike, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
               const Tensor& value_cache, const Tensor& block_table, const Tensor& slot_mapping,
               const Tensor& seq_lens, const Tensor& query_starts, double scale, int64_t window, bool chunked, double softcap,
               const std::optional<Tensor>& sinks, const std::optional<Tensor>& mask, bool causal,
               int64_t max_query_len, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  TORCH_CHECK(!mask && !k_scale && !v_scale, "core_cpu::attention takes no mask and no scales");
  const auto lens = numbers_of(seq_lens), starts = numbers_of(query_starts), slots = numbers_of(slot_mapping);
  check_lengths(query, key_cache, block_table, lens, starts);
  const Tensor rows = in_rows(query), new_keys = in_rows(key), new_values = in_rows(value);
  const Tensor table = in_rows(block_table);
  const Tensor own_sinks = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  const int64_t num_real = starts.back();
  Tensor out = empty({query.size(0), query.size(1), value.size(2)}, query.scalar_type());
  with_dtype(query.scalar_type(), "core_cpu::attention", [&]<typename T>(T) {
    write_cache<T>(new_keys, key_cache, slots.data(), num_real);
    write_cache<T>(new_values, value_cache, slots.data(), num_real);
    Call<T> call{rows.const_data_ptr<T>(), rows.stride(0), rows.stride(1), cache_of<T>(key_cache),
                 cache_of<T>(value_cache), table.const_data_ptr<int32_t>(), table.stride(0),
                 sinks ? own_sinks.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<T>(), query.size(1),
                 query.size(1) / key.size(1), static_cast<float>(scale), static_cast<float>(softcap), window, chunked,
                 causal, alike};
    attend(call, make_plan(call, key.size(1), lens, starts));
  });
  for (const auto& [from, count] : {std::pair{int64_t{0}, starts[0]}, {num_real, query.size(0) - num_real}}) {
    if (count > 0) {
      out.narrow(0, from, count).zero_();
    }
  }
  return out;
}

}  // namespace

// As `core::attention` has it, for calls that the condition in attention.py lets pass. Padding tokens are not
// written to the cache.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                 const Tensor& value_cache, const Tensor& block_table, const Tensor& slot_mapping,
                 const Tensor& seq_lens, const Tensor& query_starts, double scale, int64_t window, bool chunked, double softcap,
                 const std::optional<Tensor>& sinks, const std::optional<Tensor>& mask, bool causal,
                 int64_t max_query_len, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  return compute(false, query, key, value, key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts,
                 scale, window, chunked, softcap, sinks, mask, causal, max_query_len, k_scale, v_scale);
}

Tensor attention_alike(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& block_table, const Tensor& slot_mapping,
                       const Tensor& seq_lens, const Tensor& query_starts, double scale, int64_t window, bool chunked, double softcap,
                       const std::optional<Tensor>& sinks, const std::optional<Tensor>& mask, bool causal,
                       int64_t max_query_len, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale) {
  return compute(true, query, key, value, key_cache, value_cache, block_table, slot_mapping, seq_lens, query_starts,
                 scale, window, chunked, softcap, sinks, mask, causal, max_query_len, k_scale, v_scale);
}

CORE_CPU_DIRECT(attention, attention)
CORE_CPU_DIRECT(attention_alike, attention_alike)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("attention", Calls<attention>::boxed);
  m.impl("attention_alike", Calls<attention_alike>::boxed);
}

}  // namespace core_cpu
