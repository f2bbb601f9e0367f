// Products with weights of 8 and of 4 bits: activations are rounded to 16 bits, so the sums are of integers.

#include "integers.h"
#include "tiles.h"

#include <type_traits>

namespace {

constexpr int MAX_ROWS = MANY_REGISTERS ? 6 : 3, WIDE = MANY_REGISTERS ? 2 : 1;  // that are accumulated in registers, and tiles
constexpr int64_t TASK_TILES = 2;  // that one task computes for all rows, so that their weights stay near
constexpr int64_t LINE = 64;
constexpr int64_t FETCHED = 16384;  // bytes between the weights computed with and those fetched from memory, into the larger cache

// Rows in 16 bits, padded with zeros to whole groups; of each group the scale, and the sum.
struct Rows {
  const int16_t* values;
  const float *scales, *sums;
  int64_t groups;

  Rows from(int64_t row) const { return {values + row * groups * GROUP, scales + row * groups, sums + row * groups, groups}; }
};

// `sums` null: not wanted.
void quantise_row(const float* x, int64_t k, int64_t groups, int16_t* values, float* scales, float* sums) {
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t start = group * GROUP, count = std::min<int64_t>(GROUP, k - start);
    float last[GROUP] = {};
    if (count < GROUP) std::memcpy(last, x + start, count * sizeof(float));
    const float* from = count < GROUP ? last : x + start;
    Floats most = {};
    for (int i = 0; i < GROUP; i += LANES) most = larger(magnitude(load(from + i)), most);
    const float largest = largest_of(most), inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; i += LANES) put_rounded(values + start + i, load(from + i) * inverse);
    scales[group] = largest / 32767.0f;
    if (!sums) continue;
    int32_t total = 0;
    for (int i = 0; i < GROUP; ++i) total += values[start + i];
    sums[group] = static_cast<float>(total) * scales[group];
  }
}

// A weight is its integer times its scale, plus the least weight of its group where there is one (null: none).
template <typename Weight>
struct Matrix {
  const Weight* packed;
  const float *scales, *least, *bias;
  int64_t n;
};

// Weights of a task to come, fetched from memory a few lines with every group of those computed with.
struct Later {
  const char* next;
  const char* end;
  int64_t lines;  // a group

  void fetch() {
    for (int64_t line = 0; line < lines && next < end; ++line, next += LINE) __builtin_prefetch(next);
  }
};

// ROWS rows by TILES tiles of 16 outputs from `tile` on, their weights at `packed`. A tile is [groups][16 pairs of inputs]
// [16 outputs][2], as packed or widened to 8 bits; its scales, and least weights, [groups][16]. Without `later` reading the
// weights is what it costs, and it fetches those that follow.
template <int ROWS, int TILES, typename Packed, typename Weight>
void block(const Rows& x, const Matrix<Packed>& w, const Weight* packed, float* y, int64_t tile, Later* later) {
  constexpr int COLUMNS = TILES * PARTS, IN = WEIGHTS_IN<Weight>;
  const int64_t first_group = tile * x.groups * TILE;
  Floats out[ROWS][COLUMNS] = {};
  for (int64_t group = 0; group < x.groups; ++group) {
    if (later) {
      later->fetch();
    } else {
      constexpr int64_t SIZE = TILE * GROUP / IN;
      for (int tile_at = 0; tile_at < TILES; ++tile_at)
        for (int64_t i = 0; i < SIZE; i += LINE) __builtin_prefetch(packed + (tile_at * x.groups + group) * SIZE + FETCHED + i, 0, 2);
    }
    Sums acc[ROWS][COLUMNS] = {};
    const Weight* weights[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c)
      weights[c] = packed + ((c / PARTS * x.groups + group) * TILE * GROUP + c % PARTS * 2 * LANES) / IN;
    for (int pair = 0; pair < GROUP / 2; ++pair) {
      Pairs wide[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) wide[c] = pairs(weights[c] + pair * 2 * TILE / IN);
      for (int r = 0; r < ROWS; ++r) {
        const int32_t a = pair_of(x.values + (r * x.groups + group) * GROUP + 2 * pair);
        for (int c = 0; c < COLUMNS; ++c) acc[r][c] = dot(acc[r][c], a, wide[c]);
      }
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const int64_t at = first_group + (c / PARTS * x.groups + group) * TILE + c % PARTS * LANES;
      const Floats scale = load(w.scales + at);
      for (int r = 0; r < ROWS; ++r) out[r][c] += floats(acc[r][c]) * (scale * x.scales[r * x.groups + group]);
      if constexpr (std::is_same_v<Packed, Nibbles>)
        for (int r = 0; r < ROWS; ++r) out[r][c] += load(w.least + at) * x.sums[r * x.groups + group];
    }
  }
  for (int c = 0; c < COLUMNS; ++c) {
    const int64_t first = tile * TILE + c * LANES;
    for (int r = 0; r < ROWS; ++r) put_outputs(y + r * w.n + first, out[r][c], w.bias ? w.bias + first : nullptr, w.n - first);
  }
}

// Up to ROWS rows by the tiles `first` to `last`, whose weights begin at `packed`.
template <int ROWS, typename Packed, typename Weight>
void few_rows(const Rows& x, const Matrix<Packed>& w, const Weight* packed, float* y, int64_t rows, int64_t first, int64_t last, Later* later) {
  if (rows < ROWS) {
    if constexpr (ROWS > 1) few_rows<ROWS - 1>(x, w, packed, y, rows, first, last, later);
    return;
  }
  int64_t tile = first;
  const auto weights = [&] { return packed + (tile - first) * x.groups * TILE * GROUP / WEIGHTS_IN<Weight>; };
  for (; tile + WIDE <= last; tile += WIDE) block<ROWS, WIDE>(x, w, weights(), y, tile, later);
  if constexpr (WIDE > 1)
    for (; tile < last; ++tile) block<ROWS, 1>(x, w, weights(), y, tile, later);
}

// Weights in 8 bits, which the core's own cache holds: as they are, or unpacked to `room`.
const int8_t* in_bytes(const int8_t* from, int64_t, int8_t*) { return from; }

const int8_t* in_bytes(const Nibbles* from, int64_t count, int8_t* room) {
  for (int64_t i = 0; i < count / 2; ++i) room[2 * i] = from[i].both & 15, room[2 * i + 1] = from[i].both >> 4;
  return room;
}

// All rows by the tiles `first` to `last`. Many rows go by weights of 8 bits, and fetch those of the thread's next task.
template <typename Packed>
void all_rows(const Rows& x, const Matrix<Packed>& w, float* y, int64_t m, int64_t first, int64_t last, int8_t* room) {
  const int64_t tile_weights = x.groups * TILE * GROUP / WEIGHTS_IN<Packed>, tiles = (w.n + TILE - 1) / TILE;
  const Packed *packed = w.packed + first * tile_weights, *next = w.packed + last * tile_weights;
  if (m <= MAX_ROWS) return few_rows<MAX_ROWS>(x, w, packed, y, m, first, last, nullptr);
  const int8_t* bytes = in_bytes(packed, (last - first) * x.groups * TILE * GROUP, room);
  const int64_t later_bytes = std::min(TASK_TILES, tiles - last) * tile_weights * sizeof(Packed);
  const int64_t visits = m / MAX_ROWS * x.groups * ((last - first + WIDE - 1) / WIDE);
  const char* start = reinterpret_cast<const char*>(next);
  Later later{start, start + later_bytes, (later_bytes / LINE + visits - 1) / visits};
  for (int64_t row = 0; row < m; row += MAX_ROWS)
    few_rows<MAX_ROWS>(x.from(row), w, bytes, y + row * w.n, std::min<int64_t>(MAX_ROWS, m - row), first, last, &later);
}

template <typename Packed>
void multiply(const float* x, const Matrix<Packed>& w, float* y, int64_t m, int64_t k, int threads) {
  const int64_t groups = (k + GROUP - 1) / GROUP, tiles = (w.n + TILE - 1) / TILE;
  Aligned<int16_t> values(m * groups * GROUP);
  Aligned<float> scales(m * groups), sums(m * groups);
  const Rows rows{values.get(), scales.get(), sums.get(), groups};
#pragma omp parallel num_threads(threads)
  {
    Aligned<int8_t> room(m > MAX_ROWS && w.least ? TASK_TILES * groups * TILE * GROUP : 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < m; ++row) {
      const int64_t at = row * groups;
      quantise_row(x + row * k, k, groups, values.get() + at * GROUP, scales.get() + at, w.least ? sums.get() + at : nullptr);
    }
#pragma omp for schedule(static)
    for (int64_t first = 0; first < tiles; first += TASK_TILES)
      all_rows(rows, w, y, m, first, std::min(first + TASK_TILES, tiles), room.get());
  }
}

}  // namespace

extern "C" {

void linear_int8(const float* x, const int8_t* packed, const float* scales, const float* bias, float* y, int64_t m, int64_t k,
                 int64_t n, int threads) {
  multiply(x, Matrix<int8_t>{packed, scales, nullptr, bias, n}, y, m, k, threads);
}

void linear_int4(const float* x, const void* packed, const float* scales, const float* least, const float* bias, float* y,
                 int64_t m, int64_t k, int64_t n, int threads) {
  multiply(x, Matrix<Nibbles>{static_cast<const Nibbles*>(packed), scales, least, bias, n}, y, m, k, threads);
}
}
