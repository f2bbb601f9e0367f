// Products with int8 weights: activations are rounded to 16 bits, so the sums are of integers.

#include "integers.h"
#include "tiles.h"

namespace {

constexpr int TILE = 16;   // outputs whose weights lie together
constexpr int GROUP = 32;  // elements of a row that share a scale
constexpr int PARTS = TILE / LANES;
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int MAX_ROWS = 6, WIDE = 2;  // rows and tiles that are accumulated in registers
#else
constexpr int MAX_ROWS = 3, WIDE = 1;
#endif
constexpr int64_t TASK_TILES = 2;  // that one task computes for all rows, so that their weights stay near
constexpr int64_t LINE = 64;

// Rows in 16 bits, a scale for each group, padded with zeros to whole groups.
struct Rows {
  const int16_t* values;
  const float* scales;
  int64_t groups;
};

void quantise_row(const float* x, int64_t k, int64_t groups, int16_t* values, float* scales) {
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t start = group * GROUP, count = std::min<int64_t>(GROUP, k - start);
    float last[GROUP] = {};
    if (count < GROUP) std::memcpy(last, x + start, count * sizeof(float));
    const float* from = count < GROUP ? last : x + start;
    Floats most = {};
    for (int i = 0; i < GROUP; i += LANES) {
      const Floats value = load(from + i), magnitude = value < 0.0f ? -value : value;
      most = magnitude > most ? magnitude : most;
    }
    const float largest = largest_of(most), inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; i += LANES) put_rounded(values + start + i, load(from + i) * inverse);
    scales[group] = largest / 32767.0f;
  }
}

struct Int8Matrix {
  const int8_t* packed;
  const float* scales;
  const float* bias;
  int64_t n;
};

// ROWS rows by TILES tiles of 16 outputs from `tile` on, their weights at `packed`. A tile is [groups][16 pairs of inputs]
// [16 outputs][2], of 8 bits or widened to 16; its scales [groups][16].
template <int ROWS, int TILES, typename Weight>
void block_int8(const Rows& x, const Int8Matrix& w, const Weight* packed, float* y, int64_t tile) {
  constexpr int COLUMNS = TILES * PARTS;
  const float* scales = w.scales + tile * x.groups * TILE;
  Floats out[ROWS][COLUMNS] = {};
  for (int64_t group = 0; group < x.groups; ++group) {
    Sums acc[ROWS][COLUMNS] = {};
    const Weight* weights[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c)
      weights[c] = packed + (c / PARTS * x.groups + group) * TILE * GROUP + c % PARTS * 2 * LANES;
    for (int pair = 0; pair < GROUP / 2; ++pair) {
      Pairs wide[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) wide[c] = pairs(weights[c] + pair * 2 * TILE);
      for (int r = 0; r < ROWS; ++r) {
        const int32_t a = pair_of(x.values + (r * x.groups + group) * GROUP + 2 * pair);
        for (int c = 0; c < COLUMNS; ++c) acc[r][c] = dot(acc[r][c], a, wide[c]);
      }
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const Floats scale = load(scales + (c / PARTS * x.groups + group) * TILE + c % PARTS * LANES);
      for (int r = 0; r < ROWS; ++r) out[r][c] += floats(acc[r][c]) * (scale * x.scales[r * x.groups + group]);
    }
  }
  for (int c = 0; c < COLUMNS; ++c) {
    const int64_t first = tile * TILE + c * LANES, count = std::min<int64_t>(LANES, w.n - first);
    for (int r = 0; r < ROWS; ++r) {
      float* to = y + r * w.n + first;
      if (count == LANES)
        store(to, w.bias ? out[r][c] + load(w.bias + first) : out[r][c]);
      else
        for (int64_t lane = 0; lane < count; ++lane) to[lane] = out[r][c][lane] + (w.bias ? w.bias[first + lane] : 0.0f);
    }
  }
}

// Up to ROWS rows by the tiles `first` to `last`, whose weights begin at `packed`.
template <int ROWS, typename Weight>
void few_rows_int8(const Rows& x, const Int8Matrix& w, const Weight* packed, float* y, int64_t rows, int64_t first, int64_t last) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1) few_rows_int8<ROWS - 1>(x, w, packed, y, rows, first, last);
    return;
  }
  int64_t tile = first;
  const auto weights = [&] { return packed + (tile - first) * x.groups * TILE * GROUP; };
  for (; tile + WIDE <= last; tile += WIDE) block_int8<ROWS, WIDE>(x, w, weights(), y, tile);
  if constexpr (WIDE > 1)
    for (; tile < last; ++tile) block_int8<ROWS, 1>(x, w, weights(), y, tile);
}

// All rows by the tiles of one task. Many rows go by weights widened once, and fetch the `later` bytes of the thread's next task.
struct Task {
  int64_t first, last;
  const int8_t* later;
  int64_t later_bytes;
};

void many_rows_int8(const int16_t* values, const float* scales, int64_t groups, const Int8Matrix& w, float* y, int64_t m,
                    const Task& task, int16_t* wide) {
  const int64_t count = (task.last - task.first) * groups * TILE * GROUP;
  const int8_t* packed = w.packed + task.first * groups * TILE * GROUP;
  if (m > MAX_ROWS)
    for (int64_t i = 0; i < count; ++i) wide[i] = packed[i];
  int64_t fetched = 0;
  for (int64_t row = 0; row < m; row += MAX_ROWS) {
    const Rows rows{values + row * groups * GROUP, scales + row * groups, groups};
    const int64_t part = std::min<int64_t>(MAX_ROWS, m - row);
    if (m <= MAX_ROWS) return few_rows_int8<MAX_ROWS>(rows, w, packed, y, part, task.first, task.last);
    for (const int64_t soon = task.later_bytes * (row + part) / m; fetched < soon; fetched += LINE)
      __builtin_prefetch(task.later + fetched, 0, 2);
    few_rows_int8<MAX_ROWS>(rows, w, wide, y + row * w.n, part, task.first, task.last);
  }
}

}  // namespace

extern "C" {

void linear_int8(const float* x, const int8_t* packed, const float* scales, const float* bias, float* y, int64_t m, int64_t k,
                 int64_t n, int threads) {
  const int64_t groups = (k + GROUP - 1) / GROUP, tiles = (n + TILE - 1) / TILE, tile_bytes = groups * TILE * GROUP;
  Aligned<int16_t> values(m * groups * GROUP);
  Aligned<float> row_scales(m * groups);
  const Int8Matrix w{packed, scales, bias, n};
#pragma omp parallel num_threads(threads)
  {
    Aligned<int16_t> wide(m > MAX_ROWS ? TASK_TILES * tile_bytes : 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < m; ++row)
      quantise_row(x + row * k, k, groups, values.get() + row * groups * GROUP, row_scales.get() + row * groups);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < tiles; first += TASK_TILES) {
      const int64_t last = std::min(first + TASK_TILES, tiles), later = std::min(last + TASK_TILES, tiles);
      const Task task{first, last, packed + last * tile_bytes, (later - last) * tile_bytes};
      many_rows_int8(values.get(), row_scales.get(), groups, w, y, m, task, wide.get());
    }
  }
}
}
