// Products of a few float32 rows with weights as a file of few bits holds them: decoding reads a fifth of the bytes, and the sums
// are those of the floats that the file stands for. Every number is added up in one order whatever rows are computed together.

#include "stored.h"

namespace {

constexpr int SUMS = MANY_REGISTERS ? 8 : 4;  // summed up in registers, twice: for the first and the second of a pair of inputs
constexpr int64_t TASK_TILES = 8;

// ROWS rows by the TILES tiles from `tile` on.
template <int ROWS, int TILES, typename Weight>
void rows_by_tiles(const float* x, const Stored<Weight>& w, const float* bias, float* y, int64_t k, int64_t n, int64_t tile) {
  constexpr int COLUMNS = TILES * PARTS;
  Floats sums[ROWS][COLUMNS][2] = {};
  for (int64_t group = 0; group < w.groups; ++group) {
    Floats scales[COLUMNS], least[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) {
      scales[c] = w.scale(tile + c / PARTS, group, c % PARTS);
      least[c] = w.least_of(tile + c / PARTS, group, c % PARTS);
    }
    for (int pair = 0; pair < GROUP / 2; ++pair)
      for (int c = 0; c < COLUMNS; ++c) {
        Floats weights[2];
        weights_of(w.group(tile + c / PARTS, group), pair, c % PARTS, scales[c], least[c], weights);
        for (int r = 0; r < ROWS; ++r)
          for (int i = 0; i < 2; ++i) sums[r][c][i] += splat(x[r * k + group * GROUP + 2 * pair + i]) * weights[i];
      }
  }
  for (int c = 0; c < COLUMNS; ++c) {
    const int64_t first = tile * TILE + c * LANES;
    for (int r = 0; r < ROWS; ++r) put_outputs(y + r * n + first, sums[r][c][0] + sums[r][c][1], bias ? bias + first : nullptr, n - first);
  }
}

template <int ROWS, typename Weight>
void rows_by_all(const float* x, const Stored<Weight>& w, const float* bias, float* y, int64_t m, int64_t k, int64_t n, int64_t tile, int64_t last) {
  constexpr int TILES = std::max(1, SUMS / ROWS / PARTS / 2);
  for (; m >= ROWS; m -= ROWS, x += ROWS * k, y += ROWS * n) {
    int64_t at = tile;
    for (; at + TILES <= last; at += TILES) rows_by_tiles<ROWS, TILES>(x, w, bias, y, k, n, at);
    for (; at < last; ++at) rows_by_tiles<ROWS, 1>(x, w, bias, y, k, n, at);
  }
  if constexpr (ROWS > 1)
    if (m) rows_by_all<ROWS / 2>(x, w, bias, y, m, k, n, tile, last);
}

template <typename Weight>
void multiply(const float* x, const Stored<Weight>& w, const float* bias, float* y, int64_t m, int64_t k, int64_t n, int threads) {
  const int64_t tiles = (n + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < tiles; first += TASK_TILES)
    rows_by_all<SUMS / PARTS>(x, w, bias, y, m, k, n, first, std::min(first + TASK_TILES, tiles));
}

}  // namespace

extern "C" {

// Weights of 4 bits where there are least weights, else of 8.
void linear_stored(const float* x, const void* packed, const float* scales, const float* least, const float* bias, float* y,
                   int64_t m, int64_t k, int64_t n, int threads) {
  const int64_t groups = k / GROUP;
  if (least)
    multiply(x, Stored<Nibbles>{static_cast<const Nibbles*>(packed), scales, least, groups}, bias, y, m, k, n, threads);
  else
    multiply(x, Stored<int8_t>{static_cast<const int8_t*>(packed), scales, nullptr, groups}, bias, y, m, k, n, threads);
}
}
