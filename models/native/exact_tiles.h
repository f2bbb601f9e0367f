// Tiles of keys and values in float32: attention as exact as the numbers that it is given.

#pragma once

#include "chunk.h"

namespace {

template <int DIM>
class ExactTiles {
 public:
  explicit ExactTiles(int64_t rows) : queries_(rows * DIM), keys_(DIM * KEYS), values_(KEYS * DIM), weights_(QUERIES * KEYS) {}

  void put_query(int64_t row, const float* from, float scale) {
    for (int i = 0; i < DIM; i += LANES) store(queries_.get() + row * DIM + i, load(from + i) * scale);
  }

  // Token `at` of a tile has its keys and values at `from` and `values`; none when null.
  template <typename T>
  void put_token(int64_t at, const T* from, const T* values) {
    float *key = rows_ + at * DIM, *value = values_.get() + at * DIM;
    for (int i = 0; i < DIM; i += LANES) {
      store(key + i, from ? load(from + i) : Floats{});
      store(value + i, from ? load(values + i) : Floats{});
    }
  }

  void complete() { transpose(rows_, DIM, KEYS, DIM, keys_.get(), KEYS); }

  void attend(int64_t row, float cap, RowBlock& rows) {
    float* weights = weights_.get();
    for (int64_t at = 0; at < KEYS; at += BREADTH * LANES) {
      Floats acc[QUERIES][BREADTH] = {};
      accumulate(queries_.get() + row * DIM, DIM, keys_.get() + at, KEYS, DIM, acc);
      for (int r = 0; r < QUERIES; ++r)
        for (int c = 0; c < BREADTH; ++c) store(weights + r * KEYS + at + c * LANES, acc[r][c]);
    }
    weigh<DIM>(weights, ONES, cap, rows);
    gather<0>(rows.last(), rows.gathered);
  }

 private:
  static constexpr float ONES[QUERIES] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

  template <int AT>
  void gather(int64_t count, float* gathered) {
    constexpr int C = std::min(BREADTH, DIM / LANES - AT);
    Floats acc[QUERIES][C];
    for (int r = 0; r < QUERIES; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = load(gathered + r * DIM + (AT + c) * LANES);
    accumulate(weights_.get(), KEYS, values_.get() + AT * LANES, DIM, count, acc);
    for (int r = 0; r < QUERIES; ++r)
      for (int c = 0; c < C; ++c) store(gathered + r * DIM + (AT + c) * LANES, acc[r][c]);
    if constexpr ((AT + C) * LANES < DIM) gather<AT + C>(count, gathered);
  }

  Aligned<float> queries_, keys_, values_, weights_;  // [rows][DIM], [DIM][KEYS], [KEYS][DIM], [QUERIES][KEYS]
  alignas(64) float rows_[KEYS * DIM];                // keys as they came
};

}  // namespace
