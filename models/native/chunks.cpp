// Attention of the many queries of a prefill chunk over paged KV, on a CPU.
//
// It goes over keys and values tile by tile, once for all query heads that share them. A tile is brought into the order of its
// products once (`exact_tiles.h`, `rounded_tiles.h`) and stays in the cache beside the core; the next is fetched meanwhile.
// Every number is added up in one order whatever rows are computed together, so a row gets the same bits in any chunk.

#include "exact_tiles.h"
#include "rounded_tiles.h"

namespace {

constexpr int64_t QUERY_ROWS = 192;  // about so many rows (a query head of a token) share a tile, if threads have enough to do

// What one thread computes a task with.
template <template <int> class Tiles, int DIM>
struct Room {
  Tiles<DIM> tiles;
  Aligned<float> gathered, largest, totals;
  explicit Room(int64_t rows) : tiles(rows), gathered(rows * DIM), largest(rows), totals(rows * LANES) {}
};

// Keys and values of one KV head for the tile at `start`, wherever its blocks lie; zeros for tokens that are not in first..stop.
template <typename T, template <int> class Tiles, int DIM>
void read_tile(const Chunk& p, int64_t kv_head, int64_t start, int64_t first, int64_t stop, Tiles<DIM>& tiles) {
  for (int64_t token = start; token < start + KEYS; ++token) {
    const bool there = token >= first && token < stop;
    const T* from = there ? token_of<T>(p, token, DIM) + kv_head * DIM : nullptr;
    tiles.put_token(token - start, from, from + (there ? p.kv_heads * DIM : 0));
  }
  tiles.complete();
}

// All query heads of one KV head, for tokens `from` to `to` of the chunk.
template <typename T, template <int> class Tiles, int DIM>
void attend_task(const float* q, int64_t q_stride, const Chunk& p, int64_t kv_head, int64_t from, int64_t to,
                 Room<Tiles, DIM>& room, float* out) {
  const int64_t share = p.heads / p.kv_heads, count = (to - from) * share, before = p.total - p.m;
  const int64_t padded = (count + QUERIES - 1) / QUERIES * QUERIES;
  float *gathered = room.gathered.get(), *largest = room.largest.get(), *totals = room.totals.get();
  std::memset(gathered, 0, padded * DIM * sizeof(float));
  std::fill_n(largest, padded, -INFINITY);
  std::memset(totals, 0, padded * LANES * sizeof(float));
  const float scale = p.cap > 0.0f ? p.scale : p.scale * LOG2_E;
  const auto query = [&](int64_t row) { return q + (from + row / share) * q_stride + (kv_head * share + row % share) * DIM; };
  for (int64_t row = 0; row < padded; ++row)  // the last one stands in for those that are missing
    room.tiles.put_query(row, query(std::min(row, count - 1)), scale);
  const auto earliest = [&](int64_t token) { return std::max(p.first, before + token - p.window + 1); };
  const int64_t stop = before + to;
  for (int64_t start = earliest(from) / KEYS * KEYS, next = start + KEYS; start < stop; start += KEYS, next = start + KEYS) {
    read_tile<T>(p, kv_head, start, earliest(from), stop, room.tiles);
    for (int64_t row = 0; row < padded; row += QUERIES) {
      const int64_t soon = std::min(start + KEYS + (row + QUERIES) * KEYS / padded, stop);
      for (; next < soon; ++next) fetch<T, DIM>(p, kv_head, next);
      RowBlock rows{gathered + row * DIM, largest + row, totals + row * LANES, {}, {}};
      for (int r = 0; r < QUERIES; ++r) {
        const int64_t token = from + std::min(row + r, count - 1) / share;
        rows.begin[r] = static_cast<int>(std::clamp<int64_t>(earliest(token) - start, 0, KEYS));
        rows.end[r] = static_cast<int>(std::clamp<int64_t>(before + token + 1 - start, 0, KEYS));
      }
      if (rows.last()) room.tiles.attend(row, p.cap, rows);
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    float* to_row = out + ((from + row / share) * p.heads + kv_head * share + row % share) * DIM;
    const float inverse = 1.0f / sum(load(totals + row * LANES));
    for (int i = 0; i < DIM; i += LANES) store(to_row + i, load(gathered + row * DIM + i) * inverse);
  }
}

// How many tokens a task has: fewer where whole tasks would leave a thread idle.
int64_t tokens_of_a_task(const Chunk& p, int threads) {
  int64_t tokens = std::max<int64_t>(1, QUERY_ROWS * p.kv_heads / p.heads);
  const auto tasks = [&] { return (p.m + tokens - 1) / tokens * p.kv_heads; };
  while (tokens > 16 && tasks() < 8 * threads && tasks() % threads) tokens = (tokens + 1) / 2;
  return tokens;
}

template <template <int> class Tiles, int DIM>
void attend_tokens(const float* q, int64_t q_stride, const Chunk& p, float* out, int threads) {
  const int64_t share = p.heads / p.kv_heads, tokens = tokens_of_a_task(p, threads), parts = (p.m + tokens - 1) / tokens;
  const auto task = p.bfloat16 ? attend_task<uint16_t, Tiles, DIM> : attend_task<float, Tiles, DIM>;
#pragma omp parallel num_threads(threads)
  {
    Room<Tiles, DIM> room(tokens * share + QUERIES);
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < parts * p.kv_heads; ++number) {
      const int64_t part = parts - 1 - number / p.kv_heads;  // the longest contexts first, so that threads end together
      task(q, q_stride, p, number % p.kv_heads, part * tokens, std::min((part + 1) * tokens, p.m), room, out);
    }
  }
}

template <template <int> class Tiles>
int attend_dims(const float* q, int64_t q_stride, const Chunk& p, int64_t dim, float* out, int threads) {
  switch (dim) {
    case 16: attend_tokens<Tiles, 16>(q, q_stride, p, out, threads); return 1;
    case 32: attend_tokens<Tiles, 32>(q, q_stride, p, out, threads); return 1;
    case 64: attend_tokens<Tiles, 64>(q, q_stride, p, out, threads); return 1;
    case 80: attend_tokens<Tiles, 80>(q, q_stride, p, out, threads); return 1;
    case 96: attend_tokens<Tiles, 96>(q, q_stride, p, out, threads); return 1;
    case 128: attend_tokens<Tiles, 128>(q, q_stride, p, out, threads); return 1;
    case 256: attend_tokens<Tiles, 256>(q, q_stride, p, out, threads); return 1;
    default: return 0;
  }
}

}  // namespace

extern "C" {

// 1 when computed, 0 when there is no kernel for this head size. `out` is [m, heads, dim]. `rounded`: in 16 bits.
int attend_chunk(const float* q, int64_t q_stride, const void* cache, int bfloat16, const int64_t* table, int64_t block_tokens,
                 int64_t m, int64_t total, int64_t first, int64_t window, int64_t heads, int64_t kv_heads, int64_t dim,
                 float scale, float cap, int rounded, float* out, int threads) {
  const Chunk p{cache, bfloat16 != 0, table, block_tokens, m, total, first, window, heads, kv_heads, scale, cap};
  if (rounded) return attend_dims<RoundedTiles>(q, q_stride, p, dim, out, threads);
  return attend_dims<ExactTiles>(q, q_stride, p, dim, out, threads);
}
}
