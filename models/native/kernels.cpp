// The inner loops of decoding on a CPU, for float32 activations. Plain C interface; `models/native_kernels.py` builds and calls it.
//
// Every result is computed in an order that depends on neither the batch nor the number of threads, so that a sequence gets
// the same bits whoever it is batched with. Vectors are the compiler's own type, as wide as the processor's.

#include "vectors.h"

namespace {

constexpr int PARTS = 16 / LANES;

// ---- float32 products of a few rows: weights stay as they lie in the file --------------------------------------------------

constexpr int64_t FETCHED = 8192;  // weights between those computed with and those fetched from memory, into the larger cache

template <int ROWS>
void rows_float(const float* x, const float* w, const float* bias, float* y, int64_t k, int64_t n, int64_t first, int64_t last) {
  constexpr int COLUMNS = ROWS * 4 * PARTS <= 16 ? 4 : 2;
  const int64_t whole = k - k % LANES;
  for (int64_t column = first; column < last; column += COLUMNS) {
    Floats acc[ROWS][COLUMNS] = {};
    const float* rows[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) rows[c] = w + std::min(column + c, n - 1) * k;
    for (int64_t i = 0; i < whole; i += LANES) {
      Floats weights[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) {
        weights[c] = load(rows[c] + i);
        __builtin_prefetch(rows[c] + FETCHED + i, 0, 2);
      }
      for (int r = 0; r < ROWS; ++r) {
        const Floats value = load(x + r * k + i);
        for (int c = 0; c < COLUMNS; ++c) acc[r][c] += value * weights[c];
      }
    }
    float totals[ROWS * COLUMNS];
    sum_each<ROWS * COLUMNS>(acc[0], totals);
    for (int c = 0; c < COLUMNS && column + c < last; ++c)
      for (int r = 0; r < ROWS; ++r) {
        float total = totals[r * COLUMNS + c];
        for (int64_t i = whole; i < k; ++i) total += x[r * k + i] * rows[c][i];
        y[r * n + column + c] = total + (bias ? bias[column + c] : 0.0f);
      }
  }
}

// ---- attention of one new token a sequence over paged KV --------------------------------------------------------------------

struct Paged {  // one layer: [blocks, block_tokens, 2, kv_heads, head_dim], keys first
  int64_t block_tokens, kv_heads, heads, table_stride;
  const int64_t* tables;
  const int64_t* first;  // earliest token that a sequence sees
  const int64_t* lengths;
  float scale, cap;  // cap 0: none
};

constexpr int64_t SPLIT = 64;      // tokens that one task reads, of all heads, so that memory is read in order
constexpr int64_t MAX_SHARE = 64;  // query heads of one KV head

constexpr int AHEAD = 8;           // tokens between the one computed with and the one fetched from memory

// What a task has of one query head: its largest logit, the sum of the weights relative to it, and what they gathered.
template <int DIM>
struct State {
  float largest, total, gathered[DIM];
};

// The keys and values of one KV head for up to SPLIT tokens, each wherever it lies.
template <typename T>
struct Tokens {
  const T* const* starts;  // of each token, all heads
  int count;
  int64_t keys, values;  // where this head's lie from there
};

// logits[h * SPLIT + t] of `share` queries, already scaled.
template <typename T, int DIM>
void logits_of(const Tokens<T>& tokens, const float* queries, int64_t share, float cap, float* logits) {
  constexpr int WIDTH = DIM / LANES;
  for (int t = 0; t < tokens.count; ++t) {
    const T* from = tokens.starts[t] + tokens.keys;
    const T* later = tokens.starts[std::min(t + AHEAD, tokens.count - 1)] + tokens.keys;
    Floats key[WIDTH];
    for (int i = 0; i < WIDTH; ++i) {
      key[i] = load(from + i * LANES);
      __builtin_prefetch(later + i * LANES);
      __builtin_prefetch(later + tokens.values - tokens.keys + i * LANES, 0, 2);
    }
    for (int64_t h = 0; h < share; ++h) {
      Floats products = load(queries + h * DIM) * key[0];
      for (int i = 1; i < WIDTH; ++i) products += load(queries + h * DIM + i * LANES) * key[i];
      logits[h * SPLIT + t] = sum(products);
    }
  }
  for (int64_t h = 0; cap > 0.0f && h < share; ++h)
    for (int t = 0; t < tokens.count; ++t) logits[h * SPLIT + t] = std::tanh(logits[h * SPLIT + t] / cap) * cap;
}

template <typename T, int DIM>
void gather_values(const Tokens<T>& tokens, float* logits, State<DIM>& state) {
  constexpr int WIDTH = DIM / LANES;
  for (int t = tokens.count; t % LANES; ++t) logits[t] = -INFINITY;
  Floats most = load(logits);
  for (int t = LANES; t < tokens.count; t += LANES) most = load(logits + t) > most ? load(logits + t) : most;
  state.largest = most[0];
  for (int lane = 1; lane < LANES; ++lane) state.largest = std::max(state.largest, static_cast<float>(most[lane]));
  for (int t = 0; t < tokens.count; t += LANES) store(logits + t, exponential(load(logits + t) - state.largest));
  for (int t = tokens.count; t % LANES; ++t) logits[t] = 0.0f;
  Floats total = {}, gathered[WIDTH] = {};
  for (int t = 0; t < tokens.count; t += LANES) total += load(logits + t);
  state.total = sum(total);
  for (int t = 0; t < tokens.count; ++t) {
    const T* from = tokens.starts[t] + tokens.values;
    for (int i = 0; i < WIDTH; ++i) gathered[i] += logits[t] * load(from + i * LANES);
  }
  for (int i = 0; i < WIDTH; ++i) store(state.gathered + i * LANES, gathered[i]);
}

// All heads over tokens `start` to `start + SPLIT` of a sequence, as far as it sees them.
template <typename T, int DIM>
void attend_split(const float* q, const T* cache, const Paged& p, int64_t sequence, int64_t start, State<DIM>* states) {
  const int64_t share = p.heads / p.kv_heads, token_size = 2 * p.kv_heads * DIM;
  const int64_t begin = std::max(start, p.first[sequence]), end = std::min(start + SPLIT, p.lengths[sequence]);
  for (int64_t h = 0; h < p.heads; ++h) states[h].largest = -INFINITY;
  if (begin >= end) return;
  const T* starts[SPLIT];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = p.tables[sequence * p.table_stride + token / p.block_tokens];
    starts[token - begin] = cache + (block * p.block_tokens + token % p.block_tokens) * token_size;
  }
  float logits[MAX_SHARE * SPLIT], queries[MAX_SHARE * DIM];
  for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
    const Tokens<T> tokens{starts, static_cast<int>(end - begin), kv_head * DIM, (p.kv_heads + kv_head) * DIM};
    for (int64_t i = 0; i < share * DIM; ++i) queries[i] = q[kv_head * share * DIM + i] * p.scale;
    logits_of<T, DIM>(tokens, queries, share, p.cap, logits);
    for (int64_t h = 0; h < share; ++h) gather_values<T, DIM>(tokens, logits + h * SPLIT, states[kv_head * share + h]);
  }
}

template <int DIM>
void merge_splits(const State<DIM>* states, int64_t splits, int64_t stride, float* out) {
  constexpr int WIDTH = DIM / LANES;
  float largest = -INFINITY, total = 0.0f;
  for (int64_t s = 0; s < splits; ++s) largest = std::max(largest, states[s * stride].largest);
  Floats gathered[WIDTH] = {};
  for (int64_t s = 0; s < splits; ++s) {
    const State<DIM>& state = states[s * stride];
    if (state.largest == -INFINITY) continue;
    const float weight = std::exp(state.largest - largest);
    total += weight * state.total;
    for (int i = 0; i < WIDTH; ++i) gathered[i] += weight * load(state.gathered + i * LANES);
  }
  for (int i = 0; i < WIDTH; ++i) store(out + i * LANES, gathered[i] / total);
}

template <typename T, int DIM>
void attend_all(const float* q, int64_t q_stride, const T* cache, const Paged& p, int64_t sequences, float* out, int threads) {
  int64_t splits = 1;
  for (int64_t s = 0; s < sequences; ++s) splits = std::max(splits, (p.lengths[s] + SPLIT - 1) / SPLIT);
  std::vector<State<DIM>> states(sequences * splits * p.heads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < sequences * splits; ++task) {
      const int64_t split = task % splits, sequence = task / splits;
      attend_split<T, DIM>(q + sequence * q_stride, cache, p, sequence, split * SPLIT, states.data() + task * p.heads);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < sequences * p.heads; ++row) {
      const int64_t head = row % p.heads, sequence = row / p.heads;
      merge_splits<DIM>(states.data() + sequence * splits * p.heads + head, splits, p.heads, out + row * DIM);
    }
  }
}

template <typename T>
int attend_dims(const float* q, int64_t q_stride, const T* cache, const Paged& p, int64_t sequences, float* out, int64_t dim, int threads) {
  switch (dim) {
    case 16: attend_all<T, 16>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 32: attend_all<T, 32>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 64: attend_all<T, 64>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 80: attend_all<T, 80>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 96: attend_all<T, 96>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 128: attend_all<T, 128>(q, q_stride, cache, p, sequences, out, threads); return 1;
    case 256: attend_all<T, 256>(q, q_stride, cache, p, sequences, out, threads); return 1;
    default: return 0;
  }
}

template <typename T>
void rotate_row(float* qkv, const float* cos, const float* sin, T* slot, int64_t heads, int64_t kv_heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t head = 0; head < heads + kv_heads; ++head) {
    float* values = qkv + head * dim;
    for (int64_t i = 0; i < half; ++i) {
      const float low = values[i], high = values[i + half];
      values[i] = low * cos[i] - high * sin[i];
      values[i + half] = high * cos[i + half] + low * sin[i + half];
    }
  }
  const float* fresh = qkv + heads * dim;
  for (int64_t i = 0; i < 2 * kv_heads * dim; ++i) put(slot + i, fresh[i]);
}

}  // namespace

extern "C" {

void linear_float(const float* x, const float* w, const float* bias, float* y, int64_t m, int64_t k, int64_t n, int threads) {
  constexpr int64_t COLUMNS = 16;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t chunk = 0; chunk < (n + COLUMNS - 1) / COLUMNS; ++chunk) {
    const int64_t first = chunk * COLUMNS, last = std::min(first + COLUMNS, n);
    int64_t row = 0;
    if constexpr (PARTS == 1)
      for (; row + 8 <= m; row += 8) rows_float<8>(x + row * k, w, bias, y + row * n, k, n, first, last);
    for (; row + 4 <= m; row += 4) rows_float<4>(x + row * k, w, bias, y + row * n, k, n, first, last);
    for (; row + 2 <= m; row += 2) rows_float<2>(x + row * k, w, bias, y + row * n, k, n, first, last);
    for (; row < m; ++row) rows_float<1>(x + row * k, w, bias, y + row * n, k, n, first, last);
  }
}

void rms_norm(const float* x, const float* weight, float* y, int64_t m, int64_t k, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (m > 16)
  for (int64_t row = 0; row < m; ++row) {
    const float* from = x + row * k;
    float* to = y + row * k;
    Floats squares = {};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) squares += load(from + i) * load(from + i);
    float total = sum(squares);
    for (; i < k; ++i) total += from[i] * from[i];
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(k) + eps);
    for (i = 0; i < k; ++i) to[i] = from[i] * scale * weight[i];
  }
}

// silu(gate) * up of rows that hold gate, then up.
void gate(const float* gate_up, float* y, int64_t m, int64_t k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (m > 4)
  for (int64_t row = 0; row < m; ++row) {
    const float* from = gate_up + row * 2 * k;
    float* to = y + row * k;
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
      const Floats value = load(from + i), shrunk = exponential(value < 0.0f ? value : -value);
      store(to + i, value * (value < 0.0f ? shrunk : splat(1.0f)) / (shrunk + 1.0f) * load(from + k + i));
    }
    for (; i < k; ++i) to[i] = from[i] / (1.0f + std::exp(-from[i])) * from[k + i];
  }
}

// Turns queries and keys in place, and puts keys and values at each row's slot of the cache.
void rotate_and_store(float* qkv, const float* cos, const float* sin, void* cache, int bfloat16, const int64_t* slots, int64_t m,
                      int64_t heads, int64_t kv_heads, int64_t dim, int threads) {
  const int64_t width = (heads + 2 * kv_heads) * dim, token_size = 2 * kv_heads * dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (m > 4)
  for (int64_t row = 0; row < m; ++row) {
    const int64_t where = slots[row] * token_size;
    if (bfloat16)
      rotate_row(qkv + row * width, cos + row * dim, sin + row * dim, static_cast<uint16_t*>(cache) + where, heads, kv_heads, dim);
    else
      rotate_row(qkv + row * width, cos + row * dim, sin + row * dim, static_cast<float*>(cache) + where, heads, kv_heads, dim);
  }
}

// 1 when computed, 0 when there is no kernel for this head size or so many query heads a KV head.
int attend_decode(const float* q, int64_t q_stride, const void* cache, int bfloat16, const int64_t* tables, int64_t table_stride,
                  const int64_t* first, const int64_t* lengths, int64_t block_tokens, int64_t sequences, int64_t heads,
                  int64_t kv_heads, int64_t dim, float scale, float cap, float* out, int threads) {
  if (heads / kv_heads > MAX_SHARE) return 0;
  const Paged p{block_tokens, kv_heads, heads, table_stride, tables, first, lengths, scale, cap};
  if (bfloat16) return attend_dims(q, q_stride, static_cast<const uint16_t*>(cache), p, sequences, out, dim, threads);
  return attend_dims(q, q_stride, static_cast<const float*>(cache), p, sequences, out, dim, threads);
}
}
