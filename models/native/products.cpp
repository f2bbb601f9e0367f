// Products of many float32 rows: sums of outer products, a few numbers of some rows times whole vectors of a panel of weights that
// all rows share. The panel is brought into that order once and stays in the cache beside the core; the next is fetched meanwhile.
// Every number is added up in one order whatever rows are computed together, so a row gets the same bits in any chunk.

#include "tiles.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int ROWS = 8, STEP = 3;  // rows and vectors that are accumulated in registers
#else
constexpr int ROWS = 6, STEP = 2;
#endif
constexpr int OUTPUTS = STEP * LANES;  // of a panel of weights

struct Product {  // y = x w^T
  const float *x, *bias;
  float* y;
  int64_t m, k, n;
};

// R rows times one panel [k][OUTPUTS] of weights.
template <int R>
void rows_by_panel(const Product& p, const float* panel, int64_t row, int64_t first, const float* later = nullptr) {
  Floats acc[R][STEP] = {};
  accumulate(p.x + row * p.k, p.k, panel, OUTPUTS, p.k, acc, later);
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
      for (; row + ROWS <= m; row += ROWS) {  // the first rows also fetch the panel after this thread's
        const int64_t line = row / ROWS * k * LANES, next = (first + threads * OUTPUTS) * k;
        const bool useful = line < OUTPUTS * k && next + line + k * LANES <= n * k;
        rows_by_panel<ROWS>(p, panel.get(), row, first, useful ? w + next + line : nullptr);
      }
      if (row < m) last_rows<ROWS - 1>(p, panel.get(), row, first);
    }
  }
}
}
