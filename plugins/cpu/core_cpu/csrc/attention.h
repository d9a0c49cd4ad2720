// One share of paged attention: rows of one key/value head of one sequence over a range of its positions.
//
// A row is a token of this step and one query head of the key/value head's group: `token * group + head`, so that rows
// of a block read each key once.
#pragma once

#include <ATen/core/Tensor.h>

#include "vectors.h"

namespace core_cpu {

constexpr int64_t TILE = 64;  // positions at a time: their scores and values stay in the first cache
// Positions that are read while as many are fetched that are read later. A head's rows lie apart in the cache, so that
// processors do not foresee them: Zen 4 read at a quarter of the memory's speed.
constexpr int64_t FETCHED = 16;
constexpr int64_t MAX_ROWS = 64;  // rows of one share
constexpr int64_t FEW_ROWS = 8;  // up to so many rows a transpose of the keys costs more than sums across vectors

// A paged cache (N, P, K, size).
template <typename T>
struct Cache {
  const T* data;
  int64_t num_blocks, page, stride_block, stride_position, stride_head, size;
};

// A call of `core::attention`; strides in numbers.
template <typename T>
struct Call {
  const T* query;
  int64_t stride_query_token, stride_query_head;
  Cache<T> keys, values;
  const int32_t* block_table;
  int64_t stride_table;
  const float* sinks;  // (H,) or null
  T* out;  // (T, H, V), contiguous
  int64_t num_heads, group;
  float scale, softcap;
  int64_t window;
  bool chunked, causal;
  // Whether a row's result is added up in one order, whatever else is in the call and however many of its sequence's
  // tokens are new.
  bool alike;
};

struct Share {
  int64_t sequence, head;
  int64_t token, first_row, num_rows;  // the sequence's first token; rows of that sequence
  int64_t length, num_new;  // positions of the sequence, and how many of these are tokens of this step
  int64_t start, stop;  // positions
  int64_t block, split, num_splits;  // which block of rows; which part of its positions
};

struct Range {
  int64_t start, stop;
};

// The positions that a row of a sequence sees.
template <typename T>
Range visible(const Call<T>& call, int64_t length, int64_t num_new, int64_t row) {
  const int64_t position = length - num_new + row / call.group;
  const int64_t start = call.window == 0 ? 0
                        : call.chunked ? position / call.window * call.window
                                       : std::max<int64_t>(position - call.window + 1, 0);
  const int64_t stop = call.causal ? std::min(position + 1, length) : length;
  return {std::min(start, stop), stop};
}

// Memory that a thread keeps from one share to the next.
class Scratch {
 public:
  float* take(int64_t size) {
    if (static_cast<int64_t>(numbers_.size()) < size) {
      numbers_.assign(size, 0.f);
    }
    return numbers_.data();
  }

 private:
  std::vector<float> numbers_;
};

// What a share has computed: sums (num_rows, padded V) of values by weights, and each row's softmax.
struct Partial {
  float* sums;
  Softmax* softmax;
};

// ALIKE: as `Call::alike` has it, known to the compiler: the other form keeps the loops that it would have without it.
template <typename T, bool ALIKE>
class Tiles {
 public:
  // next: the share that this thread will probably compute then.
  Tiles(const Call<T>& call, const Share& share, const Share& next, float* scratch)
      : call_(call), share_(share), next_(next), width_(padded(call.keys.size)), out_width_(padded(call.values.size)) {
    query_ = scratch;
    rows_ = query_ + MAX_ROWS * width_;
    columns_ = rows_ + TILE * std::max(width_, out_width_);
    scores_ = columns_ + TILE * width_;
  }

  static int64_t scratch_size(const Call<T>& call) {
    const int64_t width = padded(call.keys.size), widest = std::max(width, padded(call.values.size));
    return MAX_ROWS * width + TILE * widest + TILE * width + MAX_ROWS * TILE;
  }

  // Attend over all positions of the share.
  void run(Partial partial) {
    read_query();
    std::fill_n(partial.sums, share_.num_rows * out_width_, 0.f);
    std::fill_n(partial.softmax, share_.num_rows, Softmax());
    fetch(call_.keys, share_, share_.start, TILE);
    // Where rows of a block see windows, their tiles begin at the first that is seen, or at multiples of TILE.
    const int64_t aligned = ALIKE ? share_.start / TILE * TILE : share_.start;
    for (int64_t tile = aligned; tile < share_.stop; tile += TILE) {
      const int64_t start = ALIKE ? std::max(tile, share_.start) : tile, before = ALIKE ? start - tile : 0;
      const int64_t count = std::min(tile + TILE, share_.stop) - start;
      const bool last = tile + TILE >= share_.stop;
      read(call_.keys, start, count, width_, rows_ + before * width_, call_.values, share_, start);
      score(padded(before + count));
      weigh(tile, before, before + count, partial);
      read(call_.values, start, count, out_width_, rows_, call_.keys, last ? next_ : share_,
           last ? next_.start : tile + TILE);
      multiply(scores_ + before, TILE, rows_, out_width_, partial.sums, out_width_, share_.num_rows, out_width_, count,
               true);
    }
  }

 private:
  void read_query() {
    const float factor = call_.softcap != 0.f ? call_.scale / call_.softcap : call_.scale;
    for (int64_t r = 0; r < share_.num_rows; ++r) {
      const int64_t row = share_.first_row + r;
      const int64_t token = share_.token + row / call_.group, head = share_.head * call_.group + row % call_.group;
      const T* from = call_.query + token * call_.stride_query_token + head * call_.stride_query_head;
      widen(from, call_.keys.size, query_ + r * width_, factor);
    }
  }

  // Call `work` with the address of each of `count` positions of a share from `start` on, in their order.
  template <typename Work>
  void for_positions(const Cache<T>& cache, const Share& share, int64_t start, int64_t count, const Work& work) const {
    const int32_t* table = call_.block_table + share.sequence * call_.stride_table;
    for (int64_t position = start; position < start + count;) {
      const int64_t block = table[position / cache.page], offset = position % cache.page;
      TORCH_CHECK_INDEX(block >= 0 && block < cache.num_blocks, "core::attention: block_table names block ", block,
                        " of ", cache.num_blocks);
      const T* from = cache.data + block * cache.stride_block + offset * cache.stride_position +
          share.head * cache.stride_head;
      const int64_t stop = std::min(position - offset + cache.page, start + count);
      for (; position < stop; ++position, from += cache.stride_position) {
        work(from);
      }
    }
  }

  // Fetch up to `count` positions of a share from `start` on into the second cache.
  void fetch(const Cache<T>& cache, const Share& share, int64_t start, int64_t count) const {
    constexpr int64_t NUMBERS = LINE / static_cast<int64_t>(sizeof(T));
    for_positions(cache, share, start, std::min(count, share.stop - start), [&](const T* from) {
      for (int64_t i = 0; i < cache.size; i += NUMBERS) {
        __builtin_prefetch(from + i, 0, 2);
      }
    });
  }

  // Read `count` positions from `start` on into rows of `width` numbers at `to`, and fetch as many of another cache,
  // share and position, `later`.
  void read(const Cache<T>& cache, int64_t start, int64_t count, int64_t width, float* to, const Cache<T>& other,
            const Share& share, int64_t later) {
    for (int64_t i = 0; i < count; i += FETCHED) {
      fetch(other, share, later + i, FETCHED);
      for_positions(cache, share_, start + i, std::min(FETCHED, count - i), [&](const T* from) {
        widen(from, cache.size, to, 1.f);
        to += width;
      });
    }
  }

  // Scores (num_rows, count) of the tile's keys; count: a multiple of WIDTH, what is beyond the tile is of no use.
  void score(int64_t count) {
    if (!ALIKE && share_.num_rows > FEW_ROWS) {
      transpose(rows_, width_, count, width_, columns_, TILE);
      multiply(query_, width_, columns_, TILE, scores_, TILE, share_.num_rows, count, call_.keys.size, false);
      return;
    }
    for (int64_t k = 0; k < count; k += WIDTH) {
      for (int64_t r = 0; r < share_.num_rows; ++r) {
        dots(query_ + r * width_, rows_ + k * width_, width_, width_).store(scores_ + r * TILE + k);
      }
    }
  }

  // Turn the scores of a tile from `start` on into weights, hidden positions and the first `before` into 0.
  void weigh(int64_t start, int64_t before, int64_t count, Partial partial) {
    const int64_t end = padded(count);
    for (int64_t r = 0; r < share_.num_rows; ++r) {
      float* row = scores_ + r * TILE;
      const Range seen = visible(call_, share_.length, share_.num_new, share_.first_row + r);
      if (call_.softcap != 0.f) {
        cap(row, end, call_.softcap);
      }
      std::fill(row, row + std::clamp<int64_t>(seen.start - start, before, end), HIDDEN);
      std::fill(row + std::clamp<int64_t>(std::min(seen.stop - start, count), 0, end), row + end, HIDDEN);
      const float factor = take_scores<std::is_same_v<T, float>>(row, end, partial.softmax[r]);
      if (factor != 1.f) {
        scale_row(partial.sums + r * out_width_, out_width_, factor);
      }
    }
  }

  const Call<T>& call_;
  const Share &share_, &next_;
  const int64_t width_, out_width_;
  float *query_, *rows_, *columns_, *scores_;
};

// Join what the shares of a block of rows have computed, in their order, and write the rows of the result.
template <typename T>
void write_rows(const Call<T>& call, const Share& share, const Partial* partials) {
  const int64_t size = call.values.size, width = padded(size);
  for (int64_t r = 0; r < share.num_rows; ++r) {
    const int64_t row = share.first_row + r, head = share.head * call.group + row % call.group;
    float top = call.sinks == nullptr ? HIDDEN : call.sinks[head];
    for (int64_t i = 0; i < share.num_splits; ++i) {
      top = wider(top, partials[i].softmax[r].top);
    }
    float sum = call.sinks == nullptr ? 0.f : shrunk(call.sinks[head], top);
    float* joined = partials[0].sums + r * width;
    for (int64_t i = 0; i < share.num_splits; ++i) {
      const Softmax& own = partials[i].softmax[r];
      const float factor = shrunk(own.top, top);
      const float* sums = partials[i].sums + r * width;
      sum += own.sum * factor;
      for (int64_t v = 0; v < width; ++v) {
        joined[v] = (i == 0 ? 0.f : joined[v]) + sums[v] * factor;
      }
    }
    T* to = call.out + ((share.token + row / call.group) * call.num_heads + head) * size;
    const float inverse = sum == 0.f ? 1.f : 1.f / sum;
    for (int64_t v = 0; v < size; ++v) {
      to[v] = static_cast<T>(joined[v] * inverse);
    }
  }
}

}  // namespace core_cpu
