// `core_cpu::all_reduce`, `reduce_scatter` and `all_gather`: collectives of the processes of one machine.
//
// Sums are made in the order of ranks, by the same code in each process: all of them get the same bits.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "channel.h"
#include "vectors.h"

namespace core_cpu {
namespace {

using at::Tensor;

constexpr int64_t LINE = 64;  // bytes of a line of the cache
constexpr uint64_t MOST_BYTES = (1ull << 48) - 1;  // of a tensor

enum class Collective : uint64_t { all_reduce = 1, reduce_scatter, all_gather };

// What all processes must agree on.
uint64_t kind_of(Collective collective, const Tensor& x) {
  const uint64_t dtype = static_cast<uint64_t>(x.scalar_type()), size = static_cast<uint64_t>(x.nbytes());
  return static_cast<uint64_t>(collective) << 56 | dtype << 48 | (size & MOST_BYTES);
}

std::string describe(uint64_t kind) {
  static constexpr const char* NAMES[] = {"nothing", "all_reduce", "reduce_scatter", "all_gather"};
  return std::string(NAMES[(kind >> 56) & 3]) + " of " + std::to_string(kind & MOST_BYTES) + " bytes of " +
      c10::toString(static_cast<at::ScalarType>(kind >> 48 & 0xff));
}

// --- sums

// Add integers as unsigned ones, which wrap around.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  } else {
    return a + b;
  }
}

// to = the sum of `size` (2 or more) runs of `count` numbers; 16-bit floats are added as fp32 and rounded once.
template <typename T>
void sum(const char* const* from, int size, char* into, int64_t count) {
  const auto run = [&](int i) { return reinterpret_cast<const T*>(from[i]); };
  T* to = reinterpret_cast<T*>(into);
  if constexpr (std::is_same_v<T, at::BFloat16> || std::is_same_v<T, at::Half>) {
    using Halves = at::vec::Vectorized<T>;
    for (int64_t i = 0; i < count; i += Halves::size()) {
      const int64_t num = std::min<int64_t>(Halves::size(), count - i);
      const auto read = [&](int r) {
        const T* next = run(r) + i;
        return at::vec::convert_to_float<T>(num == Halves::size() ? Halves::loadu(next) : Halves::loadu(next, num));
      };
      auto [low, high] = read(0);
      for (int r = 1; r < size; ++r) {
        const auto [next_low, next_high] = read(r);
        low = low + next_low;
        high = high + next_high;
      }
      at::vec::convert_from_float<T>(low, high).store(to + i, static_cast<int>(num));
    }
  } else {
    const T *first = run(0), *second = run(1);
    for (int64_t i = 0; i < count; ++i) {
      to[i] = add(first[i], second[i]);
    }
    for (int r = 2; r < size; ++r) {
      const T* next = run(r);
      for (int64_t i = 0; i < count; ++i) {
        to[i] = add(to[i], next[i]);
      }
    }
  }
}

using Sum = void (*)(const char* const* from, int size, char* into, int64_t count);

Sum sum_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return sum<float>;
    case at::kDouble: return sum<double>;
    case at::kBFloat16: return sum<at::BFloat16>;
    case at::kHalf: return sum<at::Half>;
    case at::kChar: return sum<int8_t>;
    case at::kByte: return sum<uint8_t>;
    case at::kInt: return sum<int32_t>;
    case at::kLong: return sum<int64_t>;
    default: TORCH_CHECK(false, "core_cpu: sums of ", c10::toString(dtype), " between processes are not known");
  }
}

// --- groups

std::mutex groups_mutex;
std::map<std::string, std::shared_ptr<Channel>, std::less<>> groups;

std::shared_ptr<Channel> find(std::string_view group) {
  const std::lock_guard<std::mutex> guard(groups_mutex);
  const auto found = groups.find(group);
  return found == groups.end() ? nullptr : found->second;
}

// The channel of a group, joined first where that was not done; null where its processes have none.
std::shared_ptr<Channel> channel_of(std::string_view group) {
  auto channel = find(group);
  if (!channel) {
    static const auto join = c10::Dispatcher::singleton().findSchemaOrThrow("core_cpu::join_group", "")
                                 .typed<bool(c10::string_view)>();
    channel = join.call(group) ? find(group) : nullptr;
  }
  return channel;
}

template <typename... Args>
Tensor as_canonical(const char* name, Args... args) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Tensor(Args...)>().call(args...);
}

// Return the file, which is the channel's number as long as it is open.
int64_t open_group(const std::vector<std::string>& names, int64_t fd, int64_t rank, int64_t size, int64_t slot,
                   double timeout_s) {
  const auto channel = std::make_shared<Channel>("'" + names.back() + "'", fd, rank, size, slot, timeout_s, describe);
  const std::lock_guard<std::mutex> guard(groups_mutex);
  for (const auto& name : names) {
    groups[name] = channel;
  }
  return fd;
}

void close_group(int64_t fd) {
  const std::lock_guard<std::mutex> guard(groups_mutex);
  std::erase_if(groups, [&](const auto& named) { return named.second->fd() == fd; });
}

// --- collectives

// Sum one run of memory over the processes: x (count) of this process, and what lies at `offset` in the messages.
void sum_messages(const Channel& channel, const char* x, int64_t offset, char* out, int64_t count, Sum add_up) {
  std::vector<const char*> runs(channel.size());
  for (int r = 0; r < channel.size(); ++r) {
    runs[r] = r == channel.rank() ? x : channel.message(r) + offset;
  }
  add_up(runs.data(), channel.size(), out, count);
}

Tensor all_reduce(const Tensor& x, c10::string_view group) {
  const auto channel = channel_of(group);
  if (!channel) {
    return as_canonical<const Tensor&, c10::string_view>("core::all_reduce", x, group);
  }
  const Sum add_up = sum_of(x.scalar_type());
  const Tensor rows = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const uint64_t kind = kind_of(Collective::all_reduce, rows);
  const int64_t total = rows.nbytes();
  const std::lock_guard<std::mutex> guard(channel->mutex());
  channel->check_usable();
  for (int64_t start = 0; start < total; start += channel->slot()) {
    const int64_t size = std::min(channel->slot(), total - start);
    std::memcpy(channel->next(), from + start, size);
    channel->exchange(kind);
    sum_messages(*channel, from + start, 0, to + start, size / rows.itemsize(), add_up);
  }
  return out;
}

Tensor reduce_scatter(const Tensor& x, c10::string_view group, int64_t dim) {
  const auto channel = channel_of(group);
  if (!channel) {
    return as_canonical<const Tensor&, c10::string_view, int64_t>("core::reduce_scatter", x, group, dim);
  }
  const int64_t num = channel->size(), rank = channel->rank();
  TORCH_CHECK(x.size(dim) % num == 0, "core_cpu::reduce_scatter: dimension ", dim, " of x has size ", x.size(dim),
              ", which ", num, " processes do not divide");
  const Sum add_up = sum_of(x.scalar_type());
  const Tensor rows = x.movedim(dim, 0).contiguous();
  Tensor out = at::empty_like(rows.narrow(0, 0, rows.size(0) / num), at::MemoryFormat::Contiguous);
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const uint64_t kind = kind_of(Collective::reduce_scatter, rows);
  const int64_t part = out.nbytes(), piece = channel->slot() / num / LINE * LINE;
  const std::lock_guard<std::mutex> guard(channel->mutex());
  channel->check_usable();
  for (int64_t start = 0; start < part; start += piece) {
    const int64_t size = std::min(piece, part - start);
    for (int64_t r = 0; r < num; ++r) {
      if (r != rank) {
        std::memcpy(channel->next() + r * piece, from + r * part + start, size);
      }
    }
    channel->exchange(kind);
    sum_messages(*channel, from + rank * part + start, rank * piece, to + start, size / rows.itemsize(), add_up);
  }
  return out.movedim(0, dim).contiguous();
}

Tensor all_gather(const Tensor& x, c10::string_view group, int64_t dim, std::optional<int64_t> size) {
  const auto channel = channel_of(group);
  if (!channel) {
    return as_canonical<const Tensor&, c10::string_view, int64_t, std::optional<c10::SymInt>>(
        "core::all_gather", x, group, dim, size ? std::optional<c10::SymInt>(*size) : std::nullopt);
  }
  const int64_t num = channel->size();
  TORCH_CHECK(!size || *size == x.size(dim) * num, "core_cpu::all_gather: size ", *size, " is not that of ", num,
              " parts of ", x.size(dim));
  const Tensor rows = x.movedim(dim, 0).contiguous();
  auto shape = rows.sizes().vec();
  shape[0] *= num;
  Tensor out = at::empty(shape, rows.options());
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const uint64_t kind = kind_of(Collective::all_gather, rows);
  const int64_t part = rows.nbytes();
  const std::lock_guard<std::mutex> guard(channel->mutex());
  channel->check_usable();
  for (int64_t start = 0; start < part; start += channel->slot()) {
    const int64_t bytes = std::min(channel->slot(), part - start);
    std::memcpy(channel->next(), from + start, bytes);
    channel->exchange(kind);
    for (int64_t r = 0; r < num; ++r) {
      std::memcpy(to + r * part + start, r == channel->rank() ? from + start : channel->message(r), bytes);
    }
  }
  return out.movedim(0, dim).contiguous();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(core_cpu, m) {
  m.def("open_group(str[] names, int fd, int rank, int size, int slot, float timeout_s) -> int", open_group);
  m.def("close_group(int fd) -> ()", close_group);
}

TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("all_reduce", all_reduce);
  m.impl("reduce_scatter", reduce_scatter);
  m.impl("all_gather", all_gather);
}

}  // namespace core_cpu
