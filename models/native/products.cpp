// Products of many float32 rows: sums of outer products, a few numbers of some rows times whole vectors of a panel of weights that
// all rows share. The panel is brought into that order once and stays in the cache beside the core; the next is fetched meanwhile.
// Every number is added up in one order whatever rows are computed together, so a row gets the same bits in any chunk.

#include "stored.h"
#include "tiles.h"

namespace {

constexpr int ROWS = MANY_REGISTERS ? 8 : 6, STEP = MANY_REGISTERS ? 3 : 2;  // that are accumulated in registers, and vectors
constexpr int OUTPUTS = STEP * LANES;  // of a panel of weights

struct Product {  // y = x w^T
  const float *x, *bias;
  float* y;
  int64_t m, k, n;
};

// Weights as floats, row by row.
struct Plain {
  const float* weights;

  const void* memory() const { return weights; }
  static constexpr int64_t bytes_of(int64_t count) { return count * static_cast<int64_t>(sizeof(float)); }
  void put_panel(const Product& p, int64_t first, float* panel) const {
    transpose(weights + first * p.k, p.k, std::min<int64_t>(OUTPUTS, p.n - first), p.k, panel, OUTPUTS);
  }
};

template <typename Weight>
struct Decoded {
  Stored<Weight> weights;

  const void* memory() const { return weights.packed; }
  static constexpr int64_t bytes_of(int64_t count) { return count / WEIGHTS_IN<Weight>; }
  void put_panel(const Product& p, int64_t first, float* panel) const {
    for (int64_t at = 0; at < OUTPUTS && first + at < p.n; at += TILE)
      for (int64_t group = 0; group < weights.groups; ++group) put_group((first + at) / TILE, group, panel + group * GROUP * OUTPUTS + at);
  }

 private:
  void put_group(int64_t tile, int64_t group, float* panel) const {
    for (int part = 0; part < PARTS; ++part) {
      const Floats scale = weights.scale(tile, group, part), least = weights.least_of(tile, group, part);
      for (int pair = 0; pair < GROUP / 2; ++pair) {
        Floats two[2];
        weights_of(weights.group(tile, group), pair, part, scale, least, two);
        for (int i = 0; i < 2; ++i) store(panel + (2 * pair + i) * OUTPUTS + part * LANES, two[i]);
      }
    }
  }
};

// R rows times one panel [k][OUTPUTS] of weights.
template <int R>
void rows_by_panel(const Product& p, const float* panel, int64_t row, int64_t first, const float* later = nullptr) {
  Floats acc[R][STEP] = {};
  accumulate(p.x + row * p.k, p.k, panel, OUTPUTS, p.k, acc, later);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < STEP; ++c) {
      const int64_t at = first + c * LANES;
      put_outputs(p.y + (row + r) * p.n + at, acc[r][c], p.bias ? p.bias + at : nullptr, p.n - at);
    }
}

template <int R>
void last_rows(const Product& p, const float* panel, int64_t row, int64_t first) {
  if (p.m - row == R) return rows_by_panel<R>(p, panel, row, first);
  if constexpr (R > 1) last_rows<R - 1>(p, panel, row, first);
}

template <typename Weights>
void multiply(const Product& p, const Weights& weights, int threads) {
  const int64_t line = p.k * LANES * static_cast<int64_t>(sizeof(float));  // bytes that ROWS rows fetch
  const int64_t panel_bytes = Weights::bytes_of(OUTPUTS * p.k), all_bytes = Weights::bytes_of(p.n * p.k);
#pragma omp parallel num_threads(threads)
  {
    Aligned<float> panel(p.k * OUTPUTS);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < (p.n + OUTPUTS - 1) / OUTPUTS; ++part) {
      weights.put_panel(p, part * OUTPUTS, panel.get());
      int64_t row = 0, later = (part + threads) * panel_bytes;
      const int64_t end = std::min(later + panel_bytes, all_bytes);
      for (; row + ROWS <= p.m; row += ROWS, later += line) {  // the first rows also fetch the panel after this thread's
        const bool useful = later < end && later + line <= all_bytes;
        const void* from = static_cast<const char*>(weights.memory()) + later;
        rows_by_panel<ROWS>(p, panel.get(), row, part * OUTPUTS, useful ? static_cast<const float*>(from) : nullptr);
      }
      if (row < p.m) last_rows<ROWS - 1>(p, panel.get(), row, part * OUTPUTS);
    }
  }
}

}  // namespace

extern "C" {

void linear_many(const float* x, const float* w, const float* bias, float* y, int64_t m, int64_t k, int64_t n, int threads) {
  multiply({x, bias, y, m, k, n}, Plain{w}, threads);
}

// As `linear_stored` takes them.
void linear_many_stored(const float* x, const void* packed, const float* scales, const float* least, const float* bias, float* y,
                        int64_t m, int64_t k, int64_t n, int threads) {
  const Product p{x, bias, y, m, k, n};
  if (least)
    multiply(p, Decoded<Nibbles>{{static_cast<const Nibbles*>(packed), scales, least, k / GROUP}}, threads);
  else
    multiply(p, Decoded<int8_t>{{static_cast<const int8_t*>(packed), scales, nullptr, k / GROUP}}, threads);
}
}
