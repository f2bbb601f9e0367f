// The inner loops of a prefill chunk on a CPU: products of many rows, and attention of many queries over paged KV.
//
// Both are sums of outer products: a few numbers of some rows, each times whole vectors of a tile that all rows share. The tile
// is brought into that order once (weights and keys transposed, values as they are) and stays in the cache beside the core.
// Every number is added up in one order whatever rows are computed together, so a row gets the same bits in any chunk.

#include "vectors.h"

#include <memory>

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int ROWS = 8, STEP = 3;        // rows and vectors that are accumulated in registers
constexpr int QUERIES = 6, BREADTH = 4;  // the same for attention, whose tiles are powers of two
#else
constexpr int ROWS = 6, STEP = 2;
constexpr int QUERIES = 6, BREADTH = 2;
#endif
constexpr int OUTPUTS = STEP * LANES;  // of a panel of weights
constexpr int64_t KEYS = 64;           // tokens of a tile of keys and values; tiles begin at multiples of it
constexpr int64_t QUERY_ROWS = 192;    // about so many rows (a query head of a token) share a tile, if threads have enough to do

constexpr float LOG2_E = 1.44269504088896341f;

template <typename T>
struct Aligned {  // to cache lines, and not written yet
  std::unique_ptr<T[]> memory;
  explicit Aligned(int64_t count) : memory(new T[count + 64 / sizeof(T)]) {}
  T* get() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63}); }
};

// acc[r][c] += a[r][i] * b[i][c] for i in 0..k.
template <int R, int C>
inline void accumulate(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, Floats (&acc)[R][C]) {
  for (int64_t i = 0; i < k; ++i) {
    Floats values[C];
    for (int c = 0; c < C; ++c) values[c] = load(b + i * b_stride + c * LANES);
    for (int r = 0; r < R; ++r) {
      const Floats factor = splat(a[r * a_stride + i]);
      for (int c = 0; c < C; ++c) acc[r][c] += factor * values[c];
    }
  }
}

// to[i][row] = from[row][i]: `rows` rows into columns of a tile that is `width` wide; multiples of four go by shuffles.
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t count, float* to, int64_t width) {
  int64_t whole_rows = 0, whole = 0;
#if defined(__SSE__)
  whole_rows = rows - rows % 4, whole = count - count % 4;
  for (int64_t i = 0; i < whole; i += 4)
    for (int64_t row = 0; row < whole_rows; row += 4) {
      __m128 a = _mm_loadu_ps(from + row * from_stride + i), b = _mm_loadu_ps(from + (row + 1) * from_stride + i);
      __m128 c = _mm_loadu_ps(from + (row + 2) * from_stride + i), d = _mm_loadu_ps(from + (row + 3) * from_stride + i);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(to + i * width + row, a);
      _mm_storeu_ps(to + (i + 1) * width + row, b);
      _mm_storeu_ps(to + (i + 2) * width + row, c);
      _mm_storeu_ps(to + (i + 3) * width + row, d);
    }
#endif
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = row < whole_rows ? whole : 0; i < count; ++i) to[i * width + row] = from[row * from_stride + i];
}

// ---- products: y = x w^T ----------------------------------------------------------------------------------------------------

struct Product {
  const float *x, *bias;
  float* y;
  int64_t m, k, n;
};

// R rows times one panel [k][OUTPUTS] of weights.
template <int R>
void rows_by_panel(const Product& p, const float* panel, int64_t row, int64_t first) {
  Floats acc[R][STEP] = {};
  accumulate(p.x + row * p.k, p.k, panel, OUTPUTS, p.k, acc);
  const int64_t count = std::min<int64_t>(OUTPUTS, p.n - first);
  for (int r = 0; r < R; ++r) {
    float* to = p.y + (row + r) * p.n + first;
    for (int c = 0; c < STEP; ++c) {
      if ((c + 1) * LANES <= count) {
        store(to + c * LANES, p.bias ? acc[r][c] + load(p.bias + first + c * LANES) : acc[r][c]);
        continue;
      }
      for (int64_t lane = c * LANES; lane < count; ++lane) to[lane] = acc[r][c][lane - c * LANES] + (p.bias ? p.bias[first + lane] : 0.0f);
    }
  }
}

template <int R>
void last_rows(const Product& p, const float* panel, int64_t row, int64_t first) {
  if (p.m - row == R) return rows_by_panel<R>(p, panel, row, first);
  if constexpr (R > 1) last_rows<R - 1>(p, panel, row, first);
}

// ---- attention --------------------------------------------------------------------------------------------------------------

// The new tokens of one sequence, the last `m` of `total`. A token sees `window` tokens back, itself among them, from `first` on.
struct Chunk {
  const void* cache;
  bool bfloat16;
  const int64_t* table;
  int64_t block_tokens, m, total, first, window, heads, kv_heads;
  float scale, cap;  // cap 0: none
};

// 2^x for x <= 0, to about two parts in 10^7: logits come scaled for it.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 bounded = _mm512_max_ps(reinterpret_cast<__m512&>(x), _mm512_set1_ps(-126.0f));
  const __m512 whole = _mm512_roundscale_ps(bounded, 0);
  const Floats r = reinterpret_cast<const Floats&>(bounded) - reinterpret_cast<const Floats&>(whole);
#else
  x = x < -126.0f ? splat(-126.0f) : x;
  const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // towards zero, which is rounding to nearest here
  const Floats r = x - __builtin_convertvector(whole, Floats);
#endif
  Floats p = splat(1.3390863e-3f);  // least error on [-1/2, 1/2]
  p = p * r + 9.6760319e-3f;
  p = p * r + 5.5503571e-2f;
  p = p * r + 2.4022107e-1f;
  p = p * r + 6.9314719e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 scaled = _mm512_scalef_ps(reinterpret_cast<__m512&>(p), whole);
  return reinterpret_cast<const Floats&>(scaled);
#else
  const Ints power = (whole + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
#endif
}

inline float largest_of(Floats value) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512&>(value));
#else
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) value[lane] = std::max<float>(value[lane], value[lane + width]);
  return value[0];
#endif
}

inline Floats capped(Floats logits, float cap) {  // tanh(logits / cap) * cap
  const Floats x = logits * (1.0f / cap), magnitude = x < 0.0f ? -x : x;
  const Floats shrunk = exponential(magnitude * -2.0f), squeezed = (1.0f - shrunk) / (1.0f + shrunk) * cap;
  return x < 0.0f ? -squeezed : squeezed;
}

// The rows of one task: query heads of one KV head, of some tokens, and what they have gathered so far.
struct RowBlock {
  float *queries, *gathered;  // [QUERIES][DIM]
  float* largest;             // [QUERIES]
  float* totals;              // [QUERIES][LANES], lanes still apart
  int begin[QUERIES], end[QUERIES];  // what each row sees of the tile
};

struct Tile {
  float *keys, *values, *weights;  // [DIM][KEYS], [KEYS][DIM], [QUERIES][KEYS]
};

template <int DIM, int AT = 0>
inline void gather_columns(const float* weights, const float* values, int64_t count, float* gathered) {
  constexpr int C = std::min(BREADTH, DIM / LANES - AT);
  Floats acc[QUERIES][C];
  for (int r = 0; r < QUERIES; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(gathered + r * DIM + (AT + c) * LANES);
  accumulate(weights, KEYS, values + AT * LANES, DIM, count, acc);
  for (int r = 0; r < QUERIES; ++r)
    for (int c = 0; c < C; ++c) store(gathered + r * DIM + (AT + c) * LANES, acc[r][c]);
  if constexpr ((AT + C) * LANES < DIM) gather_columns<DIM, AT + C>(weights, values, count, gathered);
}

// One row's logits over a tile become weights relative to the largest so far; what was gathered before follows suit.
template <int DIM>
void weigh(float* weights, float cap, RowBlock& rows, int r) {
  const int begin = rows.begin[r], end = rows.end[r];
  if (cap > 0.0f)
    for (int i = 0; i < KEYS; i += LANES) store(weights + i, capped(load(weights + i), cap) * LOG2_E);
  for (int i = 0; i < begin; ++i) weights[i] = -INFINITY;
  for (int i = end; i < KEYS; ++i) weights[i] = -INFINITY;
  Floats most = load(weights);
  for (int i = LANES; i < KEYS; i += LANES) most = load(weights + i) > most ? load(weights + i) : most;
  const float before = rows.largest[r], largest = std::max(before, largest_of(most));
  if (largest > before) {
    const float shrunk = before == -INFINITY ? 0.0f : power_of_two(splat(before - largest))[0];
    store(rows.totals + r * LANES, load(rows.totals + r * LANES) * shrunk);
    for (int i = 0; i < DIM; i += LANES) store(rows.gathered + r * DIM + i, load(rows.gathered + r * DIM + i) * shrunk);
    rows.largest[r] = largest;
  }
  for (int i = 0; i < KEYS; i += LANES) store(weights + i, power_of_two(load(weights + i) - largest));
  for (int i = 0; i < begin; ++i) weights[i] = 0.0f;
  for (int i = end; i < KEYS; ++i) weights[i] = 0.0f;
  Floats total = load(rows.totals + r * LANES);
  for (int i = 0; i < KEYS; i += LANES) total += load(weights + i);
  store(rows.totals + r * LANES, total);
}

template <int DIM>
void attend_tile(const Tile& tile, float cap, RowBlock& rows) {
  for (int64_t at = 0; at < KEYS; at += BREADTH * LANES) {
    Floats acc[QUERIES][BREADTH] = {};
    accumulate(rows.queries, DIM, tile.keys + at, KEYS, DIM, acc);
    for (int r = 0; r < QUERIES; ++r)
      for (int c = 0; c < BREADTH; ++c) store(tile.weights + r * KEYS + at + c * LANES, acc[r][c]);
  }
  int64_t count = 0;
  for (int r = 0; r < QUERIES; ++r) {
    if (rows.begin[r] >= rows.end[r]) {
      std::memset(tile.weights + r * KEYS, 0, KEYS * sizeof(float));
      continue;
    }
    weigh<DIM>(tile.weights + r * KEYS, cap, rows, r);
    count = std::max<int64_t>(count, rows.end[r]);
  }
  gather_columns<DIM>(tile.weights, tile.values, count, rows.gathered);
}

// Keys and values of one KV head for the tile at `start`, wherever its blocks lie; zeros for tokens that are not in first..stop.
template <typename T, int DIM>
void read_tile(const Chunk& p, int64_t kv_head, int64_t start, int64_t first, int64_t stop, Tile& tile) {
  const int64_t token_size = 2 * p.kv_heads * DIM;
  alignas(64) float keys[KEYS * DIM];
  for (int64_t token = start; token < start + KEYS; ++token) {
    float *key = keys + (token - start) * DIM, *value = tile.values + (token - start) * DIM;
    if (token < first || token >= stop) {
      std::memset(key, 0, DIM * sizeof(float));
      std::memset(value, 0, DIM * sizeof(float));
      continue;
    }
    const int64_t block = p.table[token / p.block_tokens];
    const T* from = static_cast<const T*>(p.cache) + (block * p.block_tokens + token % p.block_tokens) * token_size + kv_head * DIM;
    for (int i = 0; i < DIM; i += LANES) {
      store(key + i, load(from + i));
      store(value + i, load(from + p.kv_heads * DIM + i));
    }
  }
  transpose(keys, DIM, KEYS, DIM, tile.keys, KEYS);
}

// What one thread computes a task with.
template <int DIM>
struct Room {
  Aligned<float> queries, gathered, largest, totals, keys, values, weights;
  explicit Room(int64_t rows)
      : queries(rows * DIM), gathered(rows * DIM), largest(rows), totals(rows * LANES), keys(DIM * KEYS),
        values(KEYS * DIM), weights(QUERIES * KEYS) {}
};

// All query heads of one KV head, for tokens `from` to `to` of the chunk.
template <int DIM>
void attend_task(const float* q, int64_t q_stride, const Chunk& p, int64_t kv_head, int64_t from, int64_t to, Room<DIM>& room,
                 float* out) {
  const int64_t share = p.heads / p.kv_heads, count = (to - from) * share, before = p.total - p.m;
  const int64_t padded = (count + QUERIES - 1) / QUERIES * QUERIES;
  float *queries = room.queries.get(), *gathered = room.gathered.get(), *largest = room.largest.get(), *totals = room.totals.get();
  std::memset(queries, 0, padded * DIM * sizeof(float));
  std::memset(gathered, 0, padded * DIM * sizeof(float));
  std::fill_n(largest, padded, -INFINITY);
  std::memset(totals, 0, padded * LANES * sizeof(float));
  const float scale = p.cap > 0.0f ? p.scale : p.scale * LOG2_E;
  for (int64_t row = 0; row < count; ++row) {
    const float* query = q + (from + row / share) * q_stride + (kv_head * share + row % share) * DIM;
    for (int i = 0; i < DIM; i += LANES) store(queries + row * DIM + i, load(query + i) * scale);
  }
  const auto earliest = [&](int64_t token) { return std::max(p.first, before + token - p.window + 1); };
  const int64_t stop = before + to;
  Tile tile{room.keys.get(), room.values.get(), room.weights.get()};
  for (int64_t start = earliest(from) / KEYS * KEYS; start < stop; start += KEYS) {
    if (p.bfloat16)
      read_tile<uint16_t, DIM>(p, kv_head, start, earliest(from), stop, tile);
    else
      read_tile<float, DIM>(p, kv_head, start, earliest(from), stop, tile);
    for (int64_t row = 0; row < padded; row += QUERIES) {
      RowBlock rows{queries + row * DIM, gathered + row * DIM, largest + row, totals + row * LANES, {}, {}};
      bool seen = false;
      for (int r = 0; r < QUERIES; ++r) {
        const int64_t token = from + std::min(row + r, count - 1) / share;
        rows.begin[r] = static_cast<int>(std::clamp<int64_t>(earliest(token) - start, 0, KEYS));
        rows.end[r] = static_cast<int>(std::clamp<int64_t>(before + token + 1 - start, 0, KEYS));
        seen |= rows.begin[r] < rows.end[r];
      }
      if (seen) attend_tile<DIM>(tile, p.cap, rows);
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

template <int DIM>
void attend_tokens(const float* q, int64_t q_stride, const Chunk& p, float* out, int threads) {
  const int64_t share = p.heads / p.kv_heads, tokens = tokens_of_a_task(p, threads), parts = (p.m + tokens - 1) / tokens;
#pragma omp parallel num_threads(threads)
  {
    Room<DIM> room(tokens * share + QUERIES);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < parts * p.kv_heads; ++task) {
      const int64_t part = parts - 1 - task / p.kv_heads;  // the longest contexts first, so that threads end together
      attend_task<DIM>(q, q_stride, p, task % p.kv_heads, part * tokens, std::min((part + 1) * tokens, p.m), room, out);
    }
  }
}

}  // namespace

extern "C" {

void linear_many(const float* x, const float* w, const float* bias, float* y, int64_t m, int64_t k, int64_t n, int threads) {
  const Product p{x, bias, y, m, k, n};
#pragma omp parallel num_threads(threads)
  {
    Aligned<float> panel(k * OUTPUTS);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < (n + OUTPUTS - 1) / OUTPUTS; ++part) {
      const int64_t first = part * OUTPUTS;
      transpose(w + first * k, k, std::min<int64_t>(OUTPUTS, n - first), k, panel.get(), OUTPUTS);
      int64_t row = 0;
      for (; row + ROWS <= m; row += ROWS) rows_by_panel<ROWS>(p, panel.get(), row, first);
      if (row < m) last_rows<ROWS - 1>(p, panel.get(), row, first);
    }
  }
}

// 1 when computed, 0 when there is no kernel for this head size. `out` is [m, heads, dim].
int attend_chunk(const float* q, int64_t q_stride, const void* cache, int bfloat16, const int64_t* table, int64_t block_tokens,
                 int64_t m, int64_t total, int64_t first, int64_t window, int64_t heads, int64_t kv_heads, int64_t dim,
                 float scale, float cap, float* out, int threads) {
  const Chunk p{cache, bfloat16 != 0, table, block_tokens, m, total, first, window, heads, kv_heads, scale, cap};
  switch (dim) {
    case 16: attend_tokens<16>(q, q_stride, p, out, threads); return 1;
    case 32: attend_tokens<32>(q, q_stride, p, out, threads); return 1;
    case 64: attend_tokens<64>(q, q_stride, p, out, threads); return 1;
    case 80: attend_tokens<80>(q, q_stride, p, out, threads); return 1;
    case 96: attend_tokens<96>(q, q_stride, p, out, threads); return 1;
    case 128: attend_tokens<128>(q, q_stride, p, out, threads); return 1;
    case 256: attend_tokens<256>(q, q_stride, p, out, threads); return 1;
    default: return 0;
  }
}
}
