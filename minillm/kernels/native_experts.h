// A mixture of experts in one call: rows sorted by expert, both products, the weighted sum. Built in chapter 21.
//
//     chosen, token by token   [ e2 e0 | e2 e1 | e0 e2 ]          starts   0     2   3       6
//     sorted by expert         [ 0 2 | 1 | 0 1 2 ]  tokens                 e0    e1  e2
//
// The panels of an expert are read once for all of its rows, and only those of experts that have rows. Threads take units of some
// panels of one expert, the next free thread the next. Where a unit has panels of gate, it has those of up too, and applies SwiGLU
// to what both gave while that is in a near cache. How units are cut changes no bit of a row.

// The packed weights of all experts: alike in kind and sizes, see `native_experts.join`.
typedef struct {
    const Matrix *gate_up, *down;
    long experts, hidden, intermediate;
} Experts;

enum { SOFTMAX, SOFTMAX_AFTER_TOPK, SIGMOID };  // how logits become scores

// The experts of a token, best first, equal ones by number, and their weights: see `minillm.model.routing.route`. A logit that is
// not a number counts as the largest, so that it shows.
static void route_row(const T *logits, const float *bias, float *weights, int64_t *chosen, long experts, long each, long scoring,
                      int renormalise, float factor) {
    float largest = load(logits[0]), sum = 0, best[each];  // scores with the bias
    for (long e = 1; e < experts; e++) largest = load(logits[e]) > largest ? load(logits[e]) : largest;
    long count = 0;
    for (long e = 0; e < experts; e++) {
        float logit = load(logits[e]), exponential = expf(scoring == SIGMOID ? -logit : logit - largest);
        float score = scoring == SIGMOID ? 1 / (1 + exponential) : exponential, choice = bias ? score + bias[e] : score;
        if (scoring == SOFTMAX) sum += exponential;
        if (count == each && choice <= best[each - 1]) continue;
        long at = count < each ? count++ : each - 1;
        for (; at > 0 && !(choice <= best[at - 1]); at--)
            best[at] = best[at - 1], weights[at] = weights[at - 1], chosen[at] = chosen[at - 1];
        best[at] = choice, weights[at] = score, chosen[at] = e;
    }
    float of_chosen = 0;
    for (long a = 0; a < each; a++) of_chosen += weights[a];
    if (scoring == SIGMOID) sum = 1;
    if (renormalise || scoring == SOFTMAX_AFTER_TOPK) sum = of_chosen > 1e-20f ? of_chosen : 1e-20f;
    for (long a = 0; a < each; a++) weights[a] = weights[a] / sum * factor;
}

// weights and chosen [tokens, each] of logits [tokens, experts]; bias [experts] or NULL.
void route(const T *logits, const float *bias, float *weights, int64_t *chosen, long tokens, long experts, long each, long scoring,
           long renormalise, float factor) {
#pragma omp parallel for num_threads(team_size()) if (tokens * experts > PARALLEL_FROM)
    for (long i = 0; i < tokens; i++)
        route_row(logits + i * experts, bias, weights + i * each, chosen + i * each, experts, each, scoring, renormalise, factor);
}

static _Thread_local Workspace for_order, for_experts;

// Row `place[a]` of the sorted rows belongs to assignment a, a token's choice of an expert.
typedef struct {
    long *starts;  // [experts + 1]
    int64_t *place;  // [assignments]
    long *active;  // experts that have rows
    long count;    // of these
} Order;

// Returns 1 if memory ran out, 2 for an expert that is not there.
static int sort_rows(Order *order, const int64_t *chosen, long assignments, long experts) {
    long *memory = reserve(&for_order, (3 * experts + 1) * sizeof(long) + assignments * sizeof(int64_t));
    if (!memory) return 1;
    *order = (Order){memory, (int64_t *)(memory + 3 * experts + 1), memory + experts + 1, 0};
    long *next = memory + 2 * experts + 1;
    memset(order->starts, 0, (experts + 1) * sizeof(long));
    for (long a = 0; a < assignments; a++) {
        if (chosen[a] < 0 || chosen[a] >= experts) return 2;
        order->starts[chosen[a] + 1]++;
    }
    for (long e = 0; e < experts; e++) {
        if (order->starts[e + 1]) order->active[order->count++] = e;
        order->starts[e + 1] += order->starts[e];
        next[e] = order->starts[e];
    }
    for (long a = 0; a < assignments; a++) order->place[a] = next[chosen[a]]++;
    return 0;
}

// The panels from `first` to `end` of one expert, times its rows.
static void multiply_panels(const Matrix *m, const Rows *taken, long begin, long rows, long first, long end, const Target *target) {
    for (Panels of = next_panels(m, rows, first, end); of.first < end; of = next_panels(m, rows, of.first + of.count, end))
        for (long row = 0; row < rows; row += CHUNK)
            multiply_block(m, taken, begin + row, rows - row < CHUNK ? rows - row : CHUNK, rows, &of, target);
}

// silu(gate) * up of columns `from` to `to` of some rows. `gated` rows are `inner` wide; beyond `half` columns they are zero.
static void gate_rows(const T *made, T *gated, long begin, long rows, long from, long to, long half, long inner) {
    for (long row = begin; row < begin + rows; row++) {
        const T *gate = made + 2 * row * half;
        silu_mul_parts(gate + from, gate + half + from, gated + row * inner + from, to - from);
        if (to == half) memset(gated + row * inner + half, 0, (inner - half) * sizeof(T));
    }
}

// made [rows, out] = x [rows, in], sorted, each row times the weight of its expert. With `half`, made holds gate and up of so many
// columns each, and gated [rows, inner] becomes what SwiGLU makes of them. Returns 1 if memory ran out.
static int multiply_experts(const Matrix *of_expert, const Order *order, const T *x, long rows, T *made, T *gated, long half,
                            long inner) {
    const Matrix *any = of_expert + order->active[0], *first = any;
    for (long i = 0; i < order->count; i++)  // one that needs sums of spans, if any does
        if (of_expert[order->active[i]].zeros) first = of_expert + order->active[i];
    Rows taken;
    if (take_rows(first, x, rows, &taken)) return 1;
    Target target = {NULL, NULL, made, any->out};
    int in_parts = half > 0 && half % LANES == 0;  // else the panels of up begin within one
    long panels = in_parts ? half / LANES : (any->out + LANES - 1) / LANES;
    long begun = now(), done = begun;
    int size = rows * any->in * any->out > 65536 ? team_size() : 1;
    long unit = panels * order->count / (8 * size) / GROUP * GROUP;
    unit = unit < GROUP ? GROUP : unit > 8 * GROUP ? 8 * GROUP : unit;
    long units = (panels + unit - 1) / unit;
#pragma omp parallel num_threads(size)
    {
        if (takes_rows(&taken)) {
#pragma omp for
            for (long row = 0; row < rows; row++) take_row(first, &taken, row);
        }
        begin_tiles(1);
#pragma omp for schedule(monotonic : dynamic) nowait
        for (long u = 0; u < order->count * units; u++) {
            long e = order->active[u / units], begin = order->starts[e], count = order->starts[e + 1] - begin;
            long from = u % units * unit, to = from + unit < panels ? from + unit : panels;
            multiply_panels(of_expert + e, &taken, begin, count, from, to, &target);
            if (!in_parts) continue;
            multiply_panels(of_expert + e, &taken, begin, count, panels + from, panels + to, &target);
            gate_rows(made, gated, begin, count, from * LANES, to * LANES, half, inner);
        }
        end_tiles();
        if (omp_get_thread_num() == 0) done = now();
    }
    if (size > 1) note_wait(done - begun, now() - done);
    if (half > 0 && !in_parts) {
#pragma omp parallel for num_threads(size) if (rows * half > PARALLEL_FROM / 2)
        for (long row = 0; row < rows; row++) gate_rows(made, gated, row, 1, 0, half, half, inner);
    }
    return 0;
}

// out [hidden] = the sum of a token's rows, each times its weight, in the order in which the router names them.
static void sum_rows(const T *made, const int64_t *place, const float *weights, long each, T *out, long hidden) {
    long j = 0;
    for (; j + LANES <= hidden; j += LANES) {
        lanes sum = {};
        for (long a = 0; a < each; a++) sum = fused(weights[a] - (lanes){}, load_lanes(made + place[a] * hidden + j), sum);
        store_lanes(out + j, sum);
    }
    for (; j < hidden; j++) {
        float sum = 0;
        for (long a = 0; a < each; a++) sum += weights[a] * load(made[place[a] * hidden + j]);
        out[j] = store(sum);
    }
}

// out [tokens, hidden] = the weighted sums of the rows of each token, which are at place [tokens, each] of made.
void combine_rows(const T *made, const int64_t *place, const float *weights, T *out, long tokens, long each, long hidden) {
#pragma omp parallel for num_threads(team_size()) if (tokens * each * hidden > PARALLEL_FROM)
    for (long i = 0; i < tokens; i++) sum_rows(made, place + i * each, weights + i * each, each, out + i * hidden, hidden);
}

// out [tokens, hidden] = sum over the `each` experts of a token, in chosen [tokens, each], of weight * down(silu(gate(x)) * up(x)).
// Returns what `sort_rows` does.
int run_experts(const Experts *w, const T *x, const int64_t *chosen, const float *weights, T *out, long tokens, long each) {
    long rows = tokens * each, in = w->gate_up->in, inner = w->down->in, wide = 2 * w->intermediate;
    Order order;
    if (!rows) return 0;
    int failed = sort_rows(&order, chosen, rows, w->experts);
    if (failed) return failed;
    T *sorted = reserve(&for_experts, rows * (in + wide + inner + w->hidden) * sizeof(T));
    if (!sorted) return 1;
    T *made = sorted + rows * in, *gated = made + rows * wide, *downs = gated + rows * inner;
#pragma omp parallel for num_threads(team_size()) if (rows * in > PARALLEL_FROM)
    for (long a = 0; a < rows; a++) {
        T *row = sorted + order.place[a] * in;
        memcpy(row, x + a / each * w->hidden, w->hidden * sizeof(T));
        memset(row + w->hidden, 0, (in - w->hidden) * sizeof(T));
    }
    if (multiply_experts(w->gate_up, &order, sorted, rows, made, gated, w->intermediate, inner)) return 1;
    if (multiply_experts(w->down, &order, gated, rows, downs, NULL, 0, 0)) return 1;
    combine_rows(downs, order.place, weights, out, tokens, each, w->hidden);
    return 0;
}

// What stands in place of the MLP in a layer with experts: the router, how it chooses, and the experts.
typedef struct {
    Experts experts;
    Matrix router;
    const float *bias;  // [experts] or NULL
    int64_t *told;      // [tokens, each]: where the chosen experts are written for a recorder, or NULL
    long each, scoring, renormalise, tokens_at_once;
    float factor;
} Mixture;

static _Thread_local Workspace for_mixture;

// x [tokens, hidden] += what the experts make of normed [tokens, hidden]. Returns 1 if memory ran out.
static int add_mixture(const Mixture *w, const T *normed, T *x, long tokens) {
    long hidden = w->experts.hidden, experts = w->experts.experts, each = w->each;
    int64_t *chosen = reserve(&for_mixture, tokens * (each * (sizeof(int64_t) + sizeof(float)) + (experts + hidden) * sizeof(T)));
    if (!chosen) return 1;
    float *weights = (float *)(chosen + tokens * each);
    T *logits = (T *)(weights + tokens * each), *out = logits + tokens * experts;
    if (multiply(&w->router, normed, NULL, NULL, logits, tokens)) return 1;
    route(logits, w->bias, weights, chosen, tokens, experts, each, w->scoring, w->renormalise, w->factor);
    if (w->told) memcpy(w->told, chosen, tokens * each * sizeof(int64_t));
    for (long from = 0; from < tokens; from += w->tokens_at_once) {
        long count = tokens - from < w->tokens_at_once ? tokens - from : w->tokens_at_once;
        if (run_experts(&w->experts, normed + from * hidden, chosen + from * each, weights + from * each, out + from * hidden, count, each))
            return 1;
    }
#pragma omp parallel for num_threads(team_size()) if (tokens * hidden > PARALLEL_FROM)
    for (long i = 0; i < tokens; i++)
        for (long j = i * hidden; j < (i + 1) * hidden; j++) x[j] = store(load(x[j]) + load(out[j]));
    return 0;
}
