/* Compiled kernels: the inner loops of a tick, each the twin of a function of `plain.py`.
 *
 * The same IEEE operations in the same order as there, row by row, so that both give the same bytes: compiled
 * without contraction into fused operations (`hatch_build.py` says so), no exp, log or pow, and no sum over
 * rows. The stable ABI of CPython 3.11: one build serves all later versions. Arrays come by the buffer
 * protocol, so NumPy is not needed to compile.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
/* Wider registers where there are some: the operations on each value are the same. */
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define MOST_ARGS 32

/* An argument: an array of k rows of n values, `step` bytes from row to row, or a number. */
typedef struct {
    Py_buffer buffer;
    char *data;
    Py_ssize_t k, n, step;
    double number;
    int64_t whole;
} Arg;

static void release(Arg *args, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (args[i].data != NULL) PyBuffer_Release(&args[i].buffer);
}

static int is_kind(const char *format, char kind) {
    char of = format == NULL ? 'B' : format[0] == '<' || format[0] == '=' ? format[1] : format[0];
    switch (kind) {
        case 'd': return of == 'd';
        case 'f': return of == 'f';
        case 'q': return of == 'q' || (of == 'l' && sizeof(long) == 8);
        case 'i': return of == 'i';
        case 'h': return of == 'h' || of == 'H';
        case 'b': return of == 'b' || of == 'B' || of == '?';
        default: return 0;
    }
}

static int take_array(PyObject *given, Arg *arg, char kind, int writes, const char *name, Py_ssize_t place) {
    int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writes ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(given, &arg->buffer, flags) < 0) return -1;
    Py_buffer *b = &arg->buffer;
    arg->data = b->buf;
    if (b->ndim < 1 || b->ndim > 2 || !is_kind(b->format, kind)) {
        PyErr_Format(PyExc_TypeError, "%s: argument %zd: expected an array of one or two axes of kind %c, got %d of %s",
                     name, place, kind, b->ndim, b->format);
        return -1;
    }
    arg->n = b->shape[b->ndim - 1];
    arg->k = b->ndim == 2 ? b->shape[0] : 1;
    arg->step = b->ndim == 2 ? b->strides[0] : 0;
    if (arg->k == 0) arg->n = 0; /* rows of values, and none of them: there is nothing to read */
    if (arg->n > 1 && b->strides[b->ndim - 1] != b->itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: argument %zd: expected values side by side", name, place);
        return -1;
    }
    return 0;
}

/* Reads arguments as `spec` says, a letter each: d f q i h b an array (a capital is written to), a point a
 * number, a colon a whole number. Before a letter: ? allows None; * frees it of the length of the others. */
static int take_args(const char *name, const char *spec, PyObject *const *given, Py_ssize_t count, Arg *args,
                     Py_ssize_t *n) {
    Py_ssize_t i = 0;
    *n = -1;
    for (const char *c = spec; *c != 0; c++, i++) {
        int none = 0, apart = 0;
        for (; *c == '?' || *c == '*'; c++) {
            if (*c == '?') none = 1;
            else apart = 1;
        }
        memset(&args[i], 0, sizeof(Arg));
        if (i >= count) {
            PyErr_Format(PyExc_TypeError, "%s: expected more than %zd arguments", name, count);
            goto failed;
        }
        if (*c == '.') {
            args[i].number = PyFloat_AsDouble(given[i]);
            if (PyErr_Occurred()) goto failed;
        } else if (*c == ':') {
            args[i].whole = PyLong_AsLongLong(given[i]);
            if (PyErr_Occurred()) goto failed;
        } else if (!(none && given[i] == Py_None)) {
            char kind = (char)(*c | 32);
            if (take_array(given[i], &args[i], kind, *c != kind, name, i) < 0) {
                i += args[i].data != NULL;
                goto failed;
            }
            if (!apart && *n >= 0 && args[i].n != *n) {
                PyErr_Format(PyExc_ValueError, "%s: argument %zd: expected %zd values, got %zd", name, i, *n, args[i].n);
                i++;
                goto failed;
            }
            if (!apart) *n = args[i].n;
        }
    }
    if (i != count) {
        PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", name, i, count);
        goto failed;
    }
    return 0;
failed:
    release(args, i);
    return -1;
}

static PyObject *refuse(const char *name, const char *why, Arg *args, Py_ssize_t count) {
    release(args, count);
    PyErr_Format(PyExc_ValueError, "%s: %s", name, why);
    return NULL;
}

#define ROW(type, arg, at) ((type *)((arg).data + (at) * (arg).step))
#define KERNEL(name) static PyObject *name(PyObject *self, PyObject *const *given, Py_ssize_t count)
#define TAKE(spec)                                                                                                 \
    Arg args[MOST_ARGS];                                                                                           \
    Py_ssize_t n;                                                                                                  \
    (void)self;                                                                                                    \
    if (take_args(__func__, spec, given, count, args, &n) < 0) return NULL
#define DONE                                                                                                       \
    release(args, count);                                                                                          \
    Py_RETURN_NONE

/* NumPy's minimum, maximum, fmin and fmax: of equal ones the second; NaN wins in the first pair, loses in the
 * second. */
#define MINIMUM(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define MAXIMUM(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

#define MOST_FINITE 1.7976931348623157e308

/* ---- twin/estimation -------------------------------------------------------------------------------- */

WIDE static void noise_rows(Py_ssize_t n, const double *restrict difference, const int64_t *restrict heard_ns,
                            double *restrict variance, double *restrict mean, double *restrict creeping,
                            int64_t *restrict seen, int64_t *restrict off_ns, const double *restrict floor,
                            double last_share, double mean_share, double creep_share, double sigmas,
                            int64_t fault_ns, int64_t warmup) {
    for (Py_ssize_t i = 0; i < n; i++) {
        double size = fabs(difference[i]), bound = sqrt(variance[i]);
        int known = size <= MOST_FINITE;
        bound = MAXIMUM(bound, floor[i]) * sigmas;
        if (seen[i] < warmup) bound = INFINITY;
        int far = known & (size > bound), near = known & !(size > bound / 2);
        int64_t off = near ? 0 : far && off_ns[i] == 0 ? heard_ns[i] : off_ns[i];
        off_ns[i] = off;
        known &= !((off > 0) & (heard_ns[i] - off >= fault_ns));
        size = far ? bound : size;
        int64_t many = seen[i] + known;
        seen[i] = many;
        double since = 1.0 / (double)(many > 1 ? many : 1);
        double rest = copysign(size, difference[i]) - mean[i];
        rest = known ? rest : 0.0;
        double step = rest * (since > mean_share ? since : mean_share);
        double mid = mean[i] + step;
        mean[i] = mid;
        rest *= rest - step;
        double own = variance[i] - creeping[i];
        rest -= own;
        rest *= since > last_share ? since : last_share;
        step = mid * mid;
        step -= creeping[i];
        step *= since > creep_share ? since : creep_share;
        own += known ? rest : 0.0;
        double creep = creeping[i] + (known ? step : 0.0);
        creeping[i] = creep;
        variance[i] = own + creep;
    }
}

KERNEL(learn_noise) {
    TAKE("dqDDDQQd......");
    Arg *a = args;
    noise_rows(n, (double *)a[0].data, (int64_t *)a[1].data, (double *)a[2].data, (double *)a[3].data,
               (double *)a[4].data, (int64_t *)a[5].data, (int64_t *)a[6].data, (double *)a[7].data, a[8].number,
               a[9].number, a[10].number, a[11].number, (int64_t)a[12].number, (int64_t)a[13].number);
    DONE;
}

WIDE static void fit_row(Py_ssize_t n, double *restrict cell, const double *restrict keep,
                         const double *restrict weighted, const double *restrict other,
                         const double *restrict weight) {
    for (Py_ssize_t i = 0; i < n; i++) {
        double kept = cell[i] * keep[i];
        cell[i] = kept + weighted[i] * (weight[i] > 0.0 ? other[i] : 0.0);
    }
}

#define BLOCK 512

KERNEL(learn_fit) {
    char spec[MOST_ARGS] = "DDDddd...";
    Py_ssize_t k = count - 9;
    if (k < 1 || k > 8) {
        PyErr_Format(PyExc_TypeError, "learn_fit: expected 1 to 8 features, got %zd", k);
        return NULL;
    }
    memset(spec + 9, 'd', (size_t)k);
    TAKE(spec);
    if (args[0].k != k * (k + 1) / 2 || args[1].k != k)
        return refuse(__func__, "expected k (k + 1) / 2 and k rows", args, count);
    double fade = args[6].number, worth = args[7].number, dt_s = args[8].number;
    double keep[BLOCK], information[BLOCK], weighted[BLOCK];
    for (Py_ssize_t at = 0; at < n; at += BLOCK) {
        Py_ssize_t m = n - at < BLOCK ? n - at : BLOCK;
        const double *weight = (double *)args[5].data + at, *error = (double *)args[4].data + at;
        double *taught_s = (double *)args[2].data + at;
        for (Py_ssize_t i = 0; i < m; i++) {
            double sure = weight[i] > 0.0 ? error[i] : 1.0;
            keep[i] = 1.0 - weight[i] * fade;
            information[i] = weight[i] * (worth / (sure * sure));
            taught_s[i] += weight[i] * dt_s;
        }
        Py_ssize_t pair = 0;
        for (Py_ssize_t row = 0; row < k; row++) {
            const double *x = (double *)args[9 + row].data + at;
            for (Py_ssize_t i = 0; i < m; i++) weighted[i] = information[i] * (weight[i] > 0.0 ? x[i] : 0.0);
            for (Py_ssize_t other = row; other < k; other++, pair++)
                fit_row(m, ROW(double, args[0], pair) + at, keep, weighted, (double *)args[9 + other].data + at, weight);
            fit_row(m, ROW(double, args[1], row) + at, keep, weighted, (double *)args[3].data + at, weight);
        }
    }
    DONE;
}

KERNEL(fit_sigma) {
    char spec[MOST_ARGS] = "*fqD";
    Py_ssize_t k = count - 3;
    if (k < 1 || k > 8) {
        PyErr_Format(PyExc_TypeError, "fit_sigma: expected 1 to 8 features, got %zd", k);
        return NULL;
    }
    memset(spec + 4, 'd', (size_t)k);
    TAKE(spec);
    if (args[0].k != k * (k + 1) / 2) return refuse(__func__, "expected k (k + 1) / 2 rows", args, count);
    const int64_t *at = (int64_t *)args[1].data;
    double *out = (double *)args[2].data;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (at[i] < 0 || at[i] >= args[0].n) return refuse(__func__, "a row beyond the last", args, count);
        double variance = 0.0;
        Py_ssize_t first = 0;
        for (Py_ssize_t row = 0; row < k; row++) {
            double along = (double)ROW(float, args[0], first)[at[i]] * ((double *)args[3].data)[i];
            for (Py_ssize_t j = 1; j <= row; j++)
                along += (double)ROW(float, args[0], first + j)[at[i]] * ((double *)args[3 + j].data)[i];
            variance += along * along;
            first += row + 1;
        }
        out[i] = sqrt(variance);
    }
    DONE;
}

/* Powers as they come, and for how long they were missing; returns how many GPUs begin anew. */
KERNEL(hold_power) {
    TAKE("dDDD..Q");
    const double *heard = (double *)args[0].data;
    double *power_w = (double *)args[1].data, *silent_s = (double *)args[2].data;
    double *settled_s = (double *)args[3].data, hold_s = args[4].number, dt_s = args[5].number;
    int64_t *at = (int64_t *)args[6].data;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int known = fabs(heard[i]) <= MOST_FINITE, lost = silent_s[i] > hold_s;
        double silent = known ? 0.0 : silent_s[i] + dt_s, settled = settled_s[i] + dt_s;
        power_w[i] = known ? heard[i] : power_w[i];
        silent_s[i] = silent;
        settled_s[i] = lost | (silent > hold_s) ? 0.0 : settled;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (settled_s[i] <= dt_s) at[found++] = i;
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* How the lags of GPUs move, and what their temperature is expected to be; `of` is each one's node. */
KERNEL(follow_heat) {
    TAKE("DDd*d*d*didddd.D");
    Arg *a = args;
    if (a[3].n != a[4].n || a[3].n != a[5].n) return refuse(__func__, "nodes differ in number", args, count);
    double *heated = (double *)a[0].data, *twice = (double *)a[1].data, *expected = (double *)a[12].data;
    const double *power_w = (double *)a[2].data, *factor = (double *)a[3].data, *left = (double *)a[4].data;
    const double *inlet_c = (double *)a[5].data, *offset = (double *)a[7].data;
    const double *resistance = (double *)a[8].data, *lag = (double *)a[9].data, *settled_s = (double *)a[10].data;
    const int32_t *of = (int32_t *)a[6].data;
    double least_s = a[11].number;
    for (Py_ssize_t i = 0; i < n; i++) {
        int32_t node = of[i];
        if (node < 0 || node >= a[3].n) return refuse(__func__, "a node beyond the last", args, count);
        double aim = power_w[i] * factor[node], stay = left[node];
        double once = (heated[i] - aim) * stay + aim;
        double again = (twice[i] - once) * stay + once;
        heated[i] = once;
        twice[i] = again;
        double out = inlet_c[node] + offset[i];
        out += resistance[i] * once;
        out -= lag[i] * (once - again);
        expected[i] = settled_s[i] < least_s ? NAN : out;
    }
    DONE;
}

WIDE static void compare_rows(Py_ssize_t n, const double *restrict expected, const double *restrict before,
                              const double *restrict doubt, const double *restrict sigma, double share,
                              double *restrict loose, double *restrict total) {
    for (Py_ssize_t i = 0; i < n; i++) {
        double moved = fabs(expected[i] - before[i]) * share;
        moved = moved != moved ? 0.0 : moved;
        if (doubt != NULL) moved += doubt[i];
        loose[i] = moved;
        total[i] = sigma[i] + moved;
    }
}

/* A linear relation's expectation and doubts; returns how many readings are far off it. */
KERNEL(compare_linear) {
    char spec[MOST_ARGS] = "dddd?d..DDDQ";
    Py_ssize_t k = count - 11;
    if (k < 1 || k > 8) {
        PyErr_Format(PyExc_TypeError, "compare_linear: expected 1 to 8 features, got %zd", k);
        return NULL;
    }
    memset(spec + 12, 'd', (size_t)k);
    TAKE(spec);
    if (args[0].k != k) return refuse(__func__, "expected a row for each feature", args, count);
    const double *measured = (double *)args[3].data;
    double sigmas = args[6].number, *expected = (double *)args[7].data, *total = (double *)args[9].data;
    int64_t *at = (int64_t *)args[10].data;
    for (Py_ssize_t row = 0; row < k; row++) {
        const double *theta = ROW(double, args[0], row), *x = (double *)args[11 + row].data;
        for (Py_ssize_t i = 0; i < n; i++) expected[i] = row == 0 ? theta[i] * x[i] : expected[i] + theta[i] * x[i];
    }
    compare_rows(n, expected, (double *)args[1].data, (double *)args[4].data, (double *)args[2].data, args[5].number,
                 (double *)args[8].data, total);
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (fabs(measured[i] - expected[i]) > sigmas * total[i]) at[found++] = i;
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* The doubt in an expectation that has moved, and its noise; returns how many readings are far off it. */
KERNEL(doubt_moves) {
    TAKE("dddd..DQ");
    const double *expected = (double *)args[0].data, *before = (double *)args[1].data;
    const double *sigma = (double *)args[2].data, *measured = (double *)args[3].data;
    double share = args[4].number, sigmas = args[5].number, *doubt = (double *)args[6].data;
    int64_t *at = (int64_t *)args[7].data;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        double moved = fabs(expected[i] - before[i]);
        moved = moved <= MOST_FINITE ? moved : 0.0;
        doubt[i] = moved * share + sigma[i];
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (fabs(measured[i] - expected[i]) > doubt[i] * sigmas) at[found++] = i;
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* What of a difference nothing accounts for, where a reading is new. */
KERNEL(unaccounted) {
    TAKE("dddbD");
    const double *measured = (double *)args[0].data, *expected = (double *)args[1].data;
    const double *accounted = (double *)args[2].data;
    const uint8_t *fresh = (uint8_t *)args[3].data;
    double *rest = (double *)args[4].data;
    for (Py_ssize_t i = 0; i < n; i++) {
        double off = measured[i] - expected[i], left = fabs(off) - accounted[i];
        double side = off > 0.0 ? 1.0 : off < 0.0 ? -1.0 : off == 0.0 ? 0.0 : off;
        left = MAXIMUM(left, 0.0);
        rest[i] = fresh[i] ? side * left : NAN;
    }
    DONE;
}

/* What new readings teach a linear relation; returns how many are new. */
KERNEL(teach_linear) {
    TAKE("dqQ?bdqdddd...DDD");
    const Arg *a = args;
    const double *y = (double *)a[0].data, *expected = (double *)a[4].data, *sigma = (double *)a[6].data;
    const double *unknown = (double *)a[7].data, *loose = (double *)a[8].data, *error = (double *)a[9].data;
    const int64_t *read_ns = (int64_t *)a[1].data, *off_ns = (int64_t *)a[5].data;
    const uint8_t *untouched = (uint8_t *)a[3].data;
    int64_t *taught_ns = (int64_t *)a[2].data, fault_ns = (int64_t)a[10].number;
    double sigmas = a[11].number, known = a[12].number;
    double *clipped = (double *)a[13].data, *weight = (double *)a[14].data, *rest = (double *)a[15].data;
    Py_ssize_t taught = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int fresh = read_ns[i] > taught_ns[i] && (untouched == NULL || untouched[i]);
        taught_ns[i] = read_ns[i];
        taught += fresh;
        double off = y[i] - expected[i], size = fabs(off);
        int usable = fresh && size <= MOST_FINITE && !(off_ns[i] > 0 && read_ns[i] - off_ns[i] >= fault_ns);
        double bound = fabs(sigma[i]) <= MOST_FINITE ? sigmas * (sigma[i] + unknown[i]) : INFINITY;
        bound += loose[i];
        double low = expected[i] - bound, high = expected[i] + bound, held = MAXIMUM(y[i], low);
        clipped[i] = MINIMUM(held, high);
        double pace = loose[i] / error[i];
        weight[i] = usable ? 1.0 / (1.0 + pace * pace) : 0.0;
        double side = off > 0.0 ? 1.0 : off < 0.0 ? -1.0 : off == 0.0 ? 0.0 : off;
        double left = (size - loose[i]) - known * unknown[i];
        left = MAXIMUM(left, 0.0);
        rest[i] = fresh ? side * left : NAN;
    }
    release(args, count);
    return PyLong_FromSsize_t(taught);
}

static inline double finite_of(double x) {
    return x != x ? 0.0 : x > MOST_FINITE ? MOST_FINITE : x < -MOST_FINITE ? -MOST_FINITE : x;
}

WIDE static void fill_row(Py_ssize_t n, double *values) {
    for (Py_ssize_t i = 0; i < n; i++) values[i] = finite_of(values[i]);
}

/* 0 for NaN, the largest finite numbers for infinities. */
KERNEL(fill_nan) {
    TAKE("D");
    for (Py_ssize_t row = 0; row < args[0].k; row++) fill_row(n, ROW(double, args[0], row));
    DONE;
}

/* 1 sigma of a sum of independent errors. */
KERNEL(joint) {
    char spec[MOST_ARGS] = "D";
    if (count < 1 || count > 8) {
        PyErr_Format(PyExc_TypeError, "joint: expected 1 to 8 arguments, got %zd", count);
        return NULL;
    }
    memset(spec + 1, 'd', (size_t)count - 1);
    TAKE(spec);
    double *total = (double *)args[0].data;
    for (Py_ssize_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (Py_ssize_t k = 1; k < count; k++) {
            double sigma = ((double *)args[k].data)[i];
            sigma = sigma != sigma || sigma > MOST_FINITE ? 0.0 : sigma < -MOST_FINITE ? -MOST_FINITE : sigma;
            sum += sigma * sigma;
        }
        total[i] = sqrt(sum);
    }
    DONE;
}

/* Resolution of readings: the largest step of which all are multiples. */
KERNEL(follow_steps) {
    TAKE("dDD..");
    double tolerance = args[3].number, least = args[4].number;
    if (args[1].k != args[0].k || args[2].k != args[0].k) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t row = 0; row < args[0].k; row++) {
        const double *values = ROW(double, args[0], row);
        double *step = ROW(double, args[1], row), *last = ROW(double, args[2], row);
        for (Py_ssize_t i = 0; i < n; i++) {
            double value = values[i], change = fabs(value - last[i]), found = step[i];
            if (value != 0.0 && last[i] != 0.0 && change > 0.0 && found > 0.0) {
                found = MINIMUM(found, change);
                double times = value / found, left = fabs(times - rint(times));
                found = left <= tolerance ? found : left * found;
                step[i] = found > least * fabs(value) ? found : 0.0;
            }
            if (fabs(value) <= MOST_FINITE) last[i] = value;
        }
    }
    DONE;
}

/* First-order lags on their way to their aims, where these are known. */
KERNEL(move_lags) {
    TAKE("dddDQD:.D");
    const Arg *a = args;
    int fits = 1, guesses = 0;
    for (int j = 1; j < 9; j++) fits &= j == 6 || j == 7 || a[j].k == a[0].k;
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t row = 0; row < a[0].k; row++)
        for (Py_ssize_t i = 0; i < n; i++) guesses |= ROW(double, a[2], row)[i] != 0.0 || ROW(double, a[5], row)[i] != 0.0;
    for (Py_ssize_t row = 0; row < a[0].k; row++) {
        const double *aim = ROW(double, a[0], row), *share = ROW(double, a[1], row), *guessed = ROW(double, a[2], row);
        double *level = ROW(double, a[3], row), *unknown = ROW(double, a[5], row), *out = ROW(double, a[8], row);
        int64_t *known_ns = ROW(int64_t, a[4], row);
        for (Py_ssize_t i = 0; i < n; i++) {
            int known = fabs(aim[i]) <= MOST_FINITE;
            if (known) {
                level[i] += (aim[i] - level[i]) * share[i];
                if (guesses) unknown[i] += (guessed[i] - unknown[i]) * share[i];
                known_ns[i] = a[6].whole;
            }
            if (guesses && unknown[i] < a[7].number) unknown[i] = 0.0;
            out[i] = known ? level[i] : NAN;
        }
    }
    DONE;
}

WIDE static void power_rows(Py_ssize_t n, const double *restrict sm_w, const double *restrict sm,
                            const double *restrict tensor_w, const double *restrict tensor,
                            const double *restrict dram_w, const double *restrict dram,
                            const double *restrict idle_w, const double *restrict temp_c,
                            const double *restrict usual_c, const double *restrict leak,
                            double *restrict warmer, double *restrict at_rest, double *restrict dynamic,
                            double *restrict expected) {
    for (Py_ssize_t i = 0; i < n; i++) {
        double drawn = sm_w[i] * sm[i];
        if (tensor != NULL) drawn += tensor_w[i] * tensor[i];
        if (dram != NULL) drawn += dram_w[i] * dram[i];
        double warm = finite_of(temp_c[i] - usual_c[i]), rest = idle_w[i] + leak[i] * warm;
        dynamic[i] = drawn;
        warmer[i] = warm;
        at_rest[i] = rest;
        expected[i] = drawn + rest;
    }
}

/* Power of GPUs by activity, at most the cap; returns how many are at theirs. */
KERNEL(expect_power) {
    TAKE("dd?d?dddddDDDDQ");
    const Arg *a = args;
    if (a[0].k < 4) return refuse(__func__, "expected four rows of coefficients", args, count);
    const double *cap_w = (double *)a[7].data;
    double *expected = (double *)a[11].data;
    int64_t *at = (int64_t *)a[12].data;
    power_rows(n, ROW(double, a[0], 1), (double *)a[1].data, ROW(double, a[0], 2), (double *)a[2].data,
               ROW(double, a[0], 3), (double *)a[3].data, ROW(double, a[0], 0), (double *)a[4].data,
               (double *)a[5].data, (double *)a[6].data, (double *)a[8].data, (double *)a[9].data,
               (double *)a[10].data, expected);
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (expected[i] > cap_w[i]) {
            expected[i] = cap_w[i];
            at[found++] = i;
        }
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* Clock of GPUs that nothing slows; returns how many draw more than their cap. */
KERNEL(expect_clock) {
    TAKE("dddddddd.DQ");
    const double *at_rest = (double *)args[0].data, *dynamic = (double *)args[1].data;
    const double *cap_w = (double *)args[2].data, *most_w = (double *)args[3].data;
    const double *activity = (double *)args[4].data, *temp_c = (double *)args[5].data;
    const double *hot_c = (double *)args[6].data, *top_hz = (double *)args[7].data;
    double working = args[8].number, *expected = (double *)args[9].data;
    int64_t *at = (int64_t *)args[10].data;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int may_bind = (dynamic[i] != dynamic[i]) & (cap_w[i] < most_w[i]);
        int free = (activity[i] > working) & !(temp_c[i] >= hot_c[i]) & !may_bind;
        expected[i] = free ? top_hz[i] : NAN;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (at_rest[i] + dynamic[i] > cap_w[i]) at[found++] = i;
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* Places at which a reading is off its expectation by more than so many sigmas; returns their number. */
KERNEL(far_off) {
    TAKE("ddd.Q");
    const double *measured = (double *)args[0].data, *expected = (double *)args[1].data;
    const double *sigma = (double *)args[2].data;
    int64_t *at = (int64_t *)args[4].data;
    double sigmas = args[3].number;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (fabs(measured[i] - expected[i]) > sigma[i] * sigmas) at[found++] = i;
    release(args, count);
    return PyLong_FromSsize_t(found);
}

WIDE static void above(Py_ssize_t n, const float *restrict value, const double *restrict bound, double sign,
                       uint8_t *restrict flag) {
    for (Py_ssize_t i = 0; i < n; i++) flag[i] = (double)value[i] * sign > bound[i] * sign;
}

/* Places at which a value is above a bound, or below it; returns their number. */
KERNEL(beyond) {
    TAKE("fd:I");
    const float *value = (float *)args[0].data;
    const double *bound = (double *)args[1].data;
    int32_t *at = (int32_t *)args[3].data;
    double sign = args[2].whole ? -1.0 : 1.0;
    uint8_t flag[BLOCK];
    Py_ssize_t found = 0;
    for (Py_ssize_t from = 0; from < n; from += BLOCK) {
        Py_ssize_t m = n - from < BLOCK ? n - from : BLOCK;
        above(m, value + from, bound + from, sign, flag);
        if (memchr(flag, 1, (size_t)m) == NULL) continue;
        for (Py_ssize_t i = 0; i < m; i++)
            if (flag[i]) at[found++] = (int32_t)(from + i);
    }
    release(args, count);
    return PyLong_FromSsize_t(found);
}

/* ---- twin/telemetry --------------------------------------------------------------------------------- */

#define MISSING_Q INT32_MIN
#define UNTRUSTED_Q (INT32_MIN + 1)
#define ABSURD_Q (INT32_MIN + 2)
#define FIRST_VALID_Q (INT32_MIN + 16)

/* True if all of these rows or entities [m] are below a bound; of None too. */
static int within(const Arg *index, Py_ssize_t bound) {
    if (index->data == NULL) return 1;
    const int32_t *at = (int32_t *)index->data;
    for (Py_ssize_t i = 0; i < index->n; i++)
        if (at[i] < 0 || at[i] >= bound) return 0;
    return 1;
}

KERNEL(learn_cadence) {
    TAKE("*qq?i::*F*F*F*F*F*I?b.");
    const Arg *a = args;
    Py_ssize_t every = a[0].n;
    const int64_t *heard_ns = (int64_t *)a[0].data, *t_ns = (int64_t *)a[1].data;
    const int32_t *entity = (int32_t *)a[2].data;
    int64_t now_ns = a[3].whole, paused_ns = a[4].whole;
    float *longest_s[4], *usual_s = (float *)a[6].data, *lag_s = (float *)a[7].data;
    float *last_lag_s = (float *)a[8].data, *repeats = (float *)a[9].data, jump_s = (float)a[12].number;
    int32_t *gaps = (int32_t *)a[10].data;
    const uint8_t *same = (uint8_t *)a[11].data;
    int fits = a[5].k == 4 && within(&a[2], every) && (entity != NULL || n == every);
    for (int j = 5; j < 11; j++) fits &= a[j].n == every;
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (int j = 0; j < 4; j++) longest_s[j] = ROW(float, a[5], j);
    int64_t learned = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t at = entity == NULL ? i : entity[i];
        int64_t before_ns = heard_ns[at], apart_ns = t_ns[i] - before_ns;
        if (before_ns <= paused_ns || apart_ns <= 0) continue;
        learned++;
        float gap = (float)((double)apart_ns / 1e9), late = (float)((double)(now_ns - t_ns[i]) / 1e9);
        float jump = late - last_lag_s[at];
        if (jump < -jump_s && gaps[at] > 0) {
            float most = gap + jump, usual = usual_s[at];
            most = MAXIMUM(most, 0.0f) + MAXIMUM(usual, jump_s);
            gap = MINIMUM(gap, most);
        }
        last_lag_s[at] = late;
        int32_t many = gaps[at] + 1;
        gaps[at] = many;
        float share = 1.0f / (float)(many < 32 ? many : 32);
        usual_s[at] += share * (gap - usual_s[at]);
        if (same != NULL) repeats[at] += share * ((float)same[i] - repeats[at]);
        float lag = MAXIMUM(late, 0.0f);
        lag = MINIMUM(lag, 60.0f);
        lag_s[at] += (lag - lag_s[at]) * (share > 0.125f ? share : 0.125f);
        float first = longest_s[0][at], second = longest_s[1][at];
        if (gap > second) {
            float lesser = MINIMUM(gap, first);
            longest_s[1][at] = MAXIMUM(second, lesser);
            longest_s[0][at] = MAXIMUM(first, gap);
        }
        if ((many & 63) == 0) {
            longest_s[2][at] = longest_s[0][at];
            longest_s[3][at] = longest_s[1][at];
            longest_s[0][at] = longest_s[1][at] = 0.0f;
        }
    }
    release(args, count);
    return PyLong_FromLongLong(learned);
}

WIDE static int all_valid(Py_ssize_t n, const int32_t *q) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) bad |= q[i] < FIRST_VALID_Q;
    return !bad;
}

WIDE static void scale_up(Py_ssize_t n, const int32_t *restrict q, float quantum, float *restrict value) {
    for (Py_ssize_t i = 0; i < n; i++) value[i] = q[i] >= FIRST_VALID_Q ? (float)q[i] * quantum : value[i];
}

KERNEL(latch) {
    TAKE("*F*B*Q*Q*B*f*i?*i*i*q*i");
    const Arg *a = args;
    Py_ssize_t every = a[0].n, gauges = a[0].k, m = a[8].n;
    const int32_t *rows = (int32_t *)a[6].data, *entity = (int32_t *)a[7].data, *group_of = (int32_t *)a[10].data;
    int fits = a[1].n == every && a[1].k == gauges && a[2].n == every && a[2].k == gauges && a[3].n == gauges;
    fits &= a[4].n == gauges && a[5].n == gauges && a[8].k == a[6].n && a[9].n == every && a[10].n >= gauges;
    fits &= within(&a[6], gauges) && within(&a[7], every);
    fits &= a[6].n == 0 || m == (entity == NULL ? every : a[7].n);
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t k = 0; k < a[6].n; k++) {
        int32_t row = rows[k];
        const int32_t *q = ROW(int32_t, a[8], k);
        float *value = ROW(float, a[0], row), quantum = ((float *)a[5].data)[row];
        uint8_t *quality = ROW(uint8_t, a[1], row);
        int64_t *good_ns = ROW(int64_t, a[2], row), *bad_count = (int64_t *)a[3].data + row;
        if (entity == NULL) scale_up(m, q, quantum, value);
        else
            for (Py_ssize_t i = 0; i < m; i++)
                if (q[i] >= FIRST_VALID_Q) value[entity[i]] = (float)q[i] * quantum;
        if (*bad_count == 0 && all_valid(m, q)) continue;
        int32_t group = group_of[row];
        if (group < 0 || group >= a[9].k) return refuse(__func__, "a group beyond the last", args, count);
        const int64_t *t_ns = ROW(int64_t, a[9], group);
        int64_t bad = *bad_count;
        for (Py_ssize_t i = 0; i < m; i++) {
            Py_ssize_t at = entity == NULL ? i : entity[i];
            uint8_t was = quality[at], is = 0;
            if (q[i] >= FIRST_VALID_Q && was == 0) continue;
            if (q[i] < FIRST_VALID_Q) {
                is = q[i] == UNTRUSTED_Q ? 2 : q[i] == ABSURD_Q ? 3 : 4;
                if (was == 0) {
                    good_ns[at] = t_ns[at];
                    ((uint8_t *)a[4].data)[row] = 1;
                }
            }
            quality[at] = is;
            bad += (is != 0) - (was != 0);
        }
        *bad_count = bad;
    }
    DONE;
}

KERNEL(latch_counts) {
    TAKE("*Q*Q*I*i?*i*q*q");
    const Arg *a = args;
    Py_ssize_t every = a[0].n, m = a[5].n;
    const int32_t *rows = (int32_t *)a[3].data, *entity = (int32_t *)a[4].data;
    int fits = a[1].n == every && a[1].k == a[0].k && a[2].n == every && a[2].k == a[0].k && a[6].n == m;
    fits &= a[5].k == a[3].n && a[6].k == a[3].n && within(&a[3], a[0].k) && within(&a[4], every);
    fits &= a[3].n == 0 || m == (entity == NULL ? every : a[4].n);
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t k = 0; k < a[3].n; k++) {
        int64_t *raw = ROW(int64_t, a[0], rows[k]), *total = ROW(int64_t, a[1], rows[k]);
        int32_t *resets = ROW(int32_t, a[2], rows[k]);
        const int64_t *new = ROW(int64_t, a[5], k), *gain = ROW(int64_t, a[6], k);
        for (Py_ssize_t i = 0; i < m; i++) {
            Py_ssize_t at = entity == NULL ? i : entity[i];
            int64_t old = raw[at], due = (int64_t)((uint64_t)old + (uint64_t)gain[i]);
            resets[at] += (old >= 0) & (new[i] >= 0) & (new[i] != due);
            raw[at] = new[i];
            total[at] = (int64_t)((uint64_t)total[at] + (uint64_t)gain[i]);
        }
    }
    DONE;
}

WIDE static int all_inside(Py_ssize_t n, const float *value, float low, float high) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) bad |= !((value[i] >= low) & (value[i] <= high));
    return !bad;
}

WIDE static void scale_down(Py_ssize_t n, const float *restrict value, float per_quantum, int32_t *restrict q) {
    for (Py_ssize_t i = 0; i < n; i++) q[i] = (int32_t)rintf(value[i] * per_quantum);
}

/* `odd` [k, 4]: of each row how many are missing, untrusted and absurd, and the first absurd one. */
KERNEL(quantise) {
    TAKE("*f*i?*i*f*f*f*I*Q.");
    const Arg *a = args;
    Py_ssize_t every = a[0].n, m = a[6].n, found = 0;
    const int32_t *rows = (int32_t *)a[1].data, *entity = (int32_t *)a[2].data;
    float untrusted = (float)a[8].number;
    int fits = a[3].n == a[0].k && a[4].k == a[0].k && a[5].k == a[0].k && a[6].k == a[1].n && a[7].k == a[1].n;
    fits &= within(&a[1], a[0].k) && within(&a[2], every);
    fits &= a[1].n == 0 || (a[4].n == 1 && a[5].n == 1 && a[7].n == 4 && m == (entity == NULL ? every : a[2].n));
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t k = 0; k < a[1].n; k++) {
        int32_t row = rows[k], *q = ROW(int32_t, a[6], k);
        const float *value = ROW(float, a[0], row);
        int64_t *odd = ROW(int64_t, a[7], k);
        float low = ROW(float, a[4], row)[0], high = ROW(float, a[5], row)[0];
        float per_quantum = ((float *)a[3].data)[row];
        odd[0] = odd[1] = odd[2] = odd[3] = 0;
        if (entity == NULL && all_inside(m, value, low, high)) {
            scale_down(m, value, per_quantum, q);
            continue;
        }
        for (Py_ssize_t i = 0; i < m; i++) {
            float one = value[entity == NULL ? i : entity[i]];
            if (one >= low && one <= high) q[i] = (int32_t)rintf(one * per_quantum);
            else if (one != one) q[i] = MISSING_Q, odd[0]++;
            else if (one == untrusted) q[i] = UNTRUSTED_Q, odd[1]++;
            else {
                q[i] = ABSURD_Q;
                if (odd[2]++ == 0) odd[3] = i;
            }
        }
        found += (odd[0] | odd[1] | odd[2]) != 0;
    }
    release(args, count);
    return PyLong_FromSsize_t(found);
}

WIDE static int none_before(Py_ssize_t n, const uint16_t *hits, const int64_t *heard_ns, const int64_t *t_ns) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) bad |= (hits[i] != 0) | (heard_ns[i] > t_ns[i]);
    return !bad;
}

KERNEL(first_arrival) {
    TAKE("hqq");
    int first = none_before(n, (uint16_t *)args[0].data, (int64_t *)args[1].data, (int64_t *)args[2].data);
    release(args, count);
    return PyBool_FromLong(first);
}

/* Copies rows `source` of a block [k, m] to rows of a stage, from column `at` on. */
KERNEL(stage_block) {
    TAKE("*F*i*i:*f");
    const Arg *a = args;
    Py_ssize_t at = a[3].whole, m = a[4].n;
    const int32_t *rows = (int32_t *)a[1].data, *source = (int32_t *)a[2].data;
    int fits = a[1].n == a[2].n && within(&a[1], a[0].k) && within(&a[2], a[4].k);
    if (!fits || at < 0 || m > a[0].n - at) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t k = 0; k < a[1].n; k++)
        memcpy(ROW(float, a[0], rows[k]) + at, ROW(float, a[4], source[k]), sizeof(float) * (size_t)m);
    DONE;
}

WIDE static int none_leaps(Py_ssize_t n, const int64_t *raw, const int64_t *new, int64_t most) {
    int bad = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t step = (int64_t)((uint64_t)new[i] - (uint64_t)raw[i]);
        bad |= (raw[i] < 0) | (step < 0) | (step > most);
    }
    return !bad;
}

/* Counters of some rows from column `at` on, where none grew by more than its `most` [rows, 1]. */
KERNEL(count_up) {
    TAKE("*Q*Q*i:q*d");
    const Arg *a = args;
    Py_ssize_t at = a[3].whole;
    const int32_t *rows = (int32_t *)a[2].data;
    int fits = a[1].n == a[0].n && a[1].k == a[0].k && a[4].k == a[2].n && a[5].k == a[0].k && within(&a[2], a[0].k);
    fits &= a[5].n == 1 || a[5].k == 0;
    if (!fits || at < 0 || n > a[0].n - at) return refuse(__func__, "arrays do not fit", args, count);
    int grows = 1;
    for (Py_ssize_t k = 0; k < a[2].n && grows; k++) {
        double most = ROW(double, a[5], rows[k])[0];
        int64_t bound = most < 9.2e18 ? (int64_t)most : INT64_MAX;
        grows = none_leaps(n, ROW(int64_t, a[0], rows[k]) + at, ROW(int64_t, a[4], k), bound);
    }
    for (Py_ssize_t k = 0; k < a[2].n && grows; k++) {
        int64_t *raw = ROW(int64_t, a[0], rows[k]) + at, *gain = ROW(int64_t, a[1], rows[k]) + at;
        const int64_t *new = ROW(int64_t, a[4], k);
        for (Py_ssize_t i = 0; i < n; i++) {
            gain[i] = (int64_t)((uint64_t)gain[i] + ((uint64_t)new[i] - (uint64_t)raw[i]));
            raw[i] = new[i];
        }
    }
    release(args, count);
    return PyBool_FromLong(grows);
}

KERNEL(enters) {
    TAKE("ff..");
    const float *last = (float *)args[0].data, *value = (float *)args[1].data;
    float low = (float)args[2].number, high = (float)args[3].number;
    int any = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        any |= (value[i] >= low) & (value[i] <= high) & !((last[i] >= low) & (last[i] <= high));
    release(args, count);
    return PyBool_FromLong(any);
}

KERNEL(falls) {
    TAKE("ff...");
    const float *last = (float *)args[0].data, *value = (float *)args[1].data;
    float share = (float)args[2].number, low = (float)args[3].number, high = (float)args[4].number;
    int any = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        any |= (value[i] < share * last[i]) & (value[i] >= low) & (last[i] <= high);
    release(args, count);
    return PyBool_FromLong(any);
}

/* ---- twin/diagnosis --------------------------------------------------------------------------------- */

#define STOOD 1
#define LEAPT 2
#define MOVED 4

/* Up to BLOCK gauges of a row. */
WIDE static void watch_block(Py_ssize_t n, const float *restrict value, const int32_t *restrict is_new,
                             const float *restrict rate, const int32_t *restrict least_run, float *restrict last,
                             float *restrict before, float *restrict moves, float *restrict jump,
                             int32_t *restrict run, float *restrict kept, float *restrict squares,
                             float *restrict backs, int32_t *restrict changed, int32_t *restrict flag,
                             double stands, float scales, float far_back) {
    double rests[BLOCK];
    int32_t moved[BLOCK], far[BLOCK];
    for (Py_ssize_t i = 0; i < n; i++) {
        changed[i] = is_new[i] & (value[i] != last[i]);
        int32_t stood = run[i] + is_new[i];
        run[i] = changed[i] ? 0 : stood;
    }
    for (Py_ssize_t i = 0; i < n; i++) rests[i] = (double)run[i] * (double)moves[i];
    for (Py_ssize_t i = 0; i < n; i++) {
        float up = ((float)changed[i] - moves[i]) * rate[i], on = rests[i] >= stands ? 0.0f : 1.0f;
        moves[i] += on == 0.0f ? 0.0f : up;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        /* A jump: both steps, to the last reading and from it, go the same way */
        float rise = last[i] - before[i], fall = last[i] - value[i], across = fabsf(value[i] - before[i]);
        float least = rise < fall ? rise : fall, most = rise > fall ? -rise : -fall;
        float back = least > most ? least : most;
        back = rise == rise ? back : 0.0f; /* of an unknown fall it is unknown, and so not above zero */
        back = back > 0.0f ? back : 0.0f;
        back *= (float)is_new[i];
        back = back > far_back ? far_back : back;
        float square = back * back, usual = jump[i];
        backs[i] = back;
        squares[i] = square;
        kept[i] = usual;
        jump[i] = usual + (square - usual) * rate[i];
        /* Where its neighbours are farther from each other than from it, the level has moved */
        moved[i] = across > back;
        far[i] = square > usual * scales;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        flag[i] = STOOD * (run[i] >= least_run[i]) | far[i] * (LEAPT | MOVED * moved[i]);
        before[i] = is_new[i] ? last[i] : before[i];
        last[i] = is_new[i] ? value[i] : last[i];
    }
}

/* Which of up to BLOCK gauges are read anew, and how fast they learn: faster before they are settled. */
WIDE static void watch_rates(Py_ssize_t n, const uint8_t *restrict new, const int32_t *restrict seen, int64_t settled,
                             float per_reading, int32_t *restrict is_new, float *restrict rate) {
    for (Py_ssize_t i = 0; i < n; i++) is_new[i] = 1;
    for (Py_ssize_t i = 0; i < n && new != NULL; i++) is_new[i] = new[i] != 0;
    for (Py_ssize_t i = 0; i < n; i++) rate[i] = per_reading;
    for (Py_ssize_t i = 0; i < n && !settled; i++) {
        float here = 1.0f / ((float)seen[i] + 1.0f);
        rate[i] = MAXIMUM(here, per_reading);
    }
    for (Py_ssize_t i = 0; i < n && new != NULL; i++) rate[i] = is_new[i] ? rate[i] : 0.0f;
}

/* Learns which share of the changes is of another size than the change before. */
WIDE static void vary(Py_ssize_t n, const float *restrict value, const float *restrict old,
                      const int32_t *restrict changed, const float *restrict rate, float *restrict change,
                      float *restrict varied, float other_size) {
    for (Py_ssize_t i = 0; i < n; i++) {
        float size = fabsf(value[i] - old[i]), differs = fabsf(size - change[i]);
        float share = varied[i] + ((float)(differs > change[i] * other_size) - varied[i]) * rate[i];
        varied[i] = changed[i] ? share : varied[i];
        change[i] = changed[i] ? size : change[i];
    }
}

/* A leap's usual size and the readings without a change of gauges side by side, each cell with the limits of its
 * column, or of its row. Returns how many cells have stood still for long, and how many leapt far; which, is in
 * the last two arrays. */
KERNEL(watch_gauges) {
    TAKE("f?bFFIFiFB?F?F*i*f*f*b*f::.....*Q*Q");
    const Arg *a = args;
    Py_ssize_t k = a[0].k, still = 0, leapt = 0, traits = a[11].n, most = a[15].n - 1;
    const int32_t *least_run = (int32_t *)a[11].data;
    const float *least_k = (float *)a[12].data, *least_pu = (float *)a[13].data, *widening = (float *)a[15].data;
    const uint8_t *noisy = (uint8_t *)a[14].data;
    int64_t settled = a[16].whole, thaw = a[17].whole;
    int64_t *at_still = (int64_t *)a[23].data, *at_leapt = (int64_t *)a[24].data;
    float per_reading = (float)a[18].number, scales = (float)a[20].number, far_back = (float)a[21].number;
    float other_size = (float)a[22].number;
    double stands = a[19].number;
    int fits = a[23].n >= k * n && a[24].n >= k * n && traits == (k == 1 ? n : k) && most >= 0;
    for (int j = 1; j < 11; j++) fits &= a[j].data == NULL || a[j].k == k;
    for (int j = 12; j < 15; j++) fits &= a[j].n == traits;
    fits &= (a[9].data == NULL) == (a[10].data == NULL);
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    float rate[BLOCK], kept[BLOCK], squares[BLOCK], backs[BLOCK], old[BLOCK];
    int32_t is_new[BLOCK], least[BLOCK], changed[BLOCK], flag[BLOCK];
    for (Py_ssize_t row = 0; row < k; row++) {
        for (Py_ssize_t i = 0; i < BLOCK && k > 1; i++) least[i] = least_run[row];
        for (Py_ssize_t from = 0; from < n; from += BLOCK) {
            Py_ssize_t m = n - from < BLOCK ? n - from : BLOCK;
            const float *value = ROW(float, a[0], row) + from;
            const uint8_t *new = a[1].data == NULL ? NULL : ROW(uint8_t, a[1], row) + from;
            const int32_t *seen = ROW(int32_t, a[6], row) + from;
            float *last = ROW(float, a[2], row) + from, *jump = ROW(float, a[7], row) + from;
            watch_rates(m, new, seen, settled, per_reading, is_new, rate);
            if (k == 1) memcpy(least, least_run + from, sizeof(int32_t) * (size_t)m);
            if (a[9].data != NULL) memcpy(old, last, sizeof(float) * (size_t)m);
            watch_block(m, value, is_new, rate, least, last, ROW(float, a[3], row) + from,
                        ROW(float, a[5], row) + from, jump, ROW(int32_t, a[4], row) + from, kept, squares, backs,
                        changed, flag, stands, scales, far_back);
            if (a[9].data != NULL)
                vary(m, value, old, changed, rate, ROW(float, a[9], row) + from, ROW(float, a[10], row) + from, other_size);
            uint8_t *frozen = ROW(uint8_t, a[8], row) + from;
            for (Py_ssize_t i = 0; i < m && thaw; i++) frozen[i] &= !is_new[i];
            for (Py_ssize_t i = 0; i < m; i++) {
                if (flag[i] == 0) continue;
                Py_ssize_t at = from + i, trait = k == 1 ? at : row;
                if (flag[i] & STOOD) at_still[still++] = row * n + at;
                if (!(flag[i] & LEAPT) || !noisy[trait]) continue;
                Py_ssize_t many = seen[i] < 0 ? 0 : seen[i] < most ? seen[i] : most;
                if (!(backs[i] > least_k[trait] + least_pu[trait] * fabsf(value[i]))) continue;
                if (!(squares[i] / widening[many] > kept[i] * scales)) continue;
                jump[i] = kept[i] + 0.0f;
                if (!(flag[i] & MOVED)) at_leapt[leapt++] = row * n + at;
            }
        }
    }
    release(args, count);
    return Py_BuildValue("nn", still, leapt);
}

/* Bounds deviations and moves their means; returns the largest, and which are to be counted. */
WIDE static float deviate(Py_ssize_t n, float *restrict z, const uint8_t *fresh, float *restrict mean,
                          float *restrict last, const uint8_t *restrict live, float farthest, float share,
                          float off_sigmas, int32_t *restrict odd) {
    float largest = 0.0f;
    int32_t is_new[BLOCK];
    for (Py_ssize_t i = 0; i < n; i++) is_new[i] = fresh == NULL || fresh[i];
    for (Py_ssize_t i = 0; i < n; i++) {
        float one = z[i];
        one = one != one ? 0.0f : one;
        one = one < -farthest ? -farthest : one > farthest ? farthest : one;
        z[i] = one;
        float size = fabsf(one);
        mean[i] += (one - mean[i]) * share * (float)is_new[i];
        last[i] = is_new[i] ? one : last[i];
        odd[i] = is_new[i] & ((size > off_sigmas) | (live[i] != 0));
    }
    for (Py_ssize_t i = 0; i < n; i++) largest = fabsf(z[i]) > largest ? fabsf(z[i]) : largest;
    return largest;
}

/* One reading of deviations `z` in sigmas, by cell. Returns the largest deviation, whether a sum is certain, and
 * how many cells counted it; which, is in the last array. */
KERNEL(add_deviations) {
    TAKE("F?bFFBFFFHf........:*Q");
    const Arg *a = args;
    Py_ssize_t r = a[0].k, counted = 0;
    float farthest = (float)a[10].number, share = (float)a[11].number, off_sigmas = (float)a[12].number;
    float wild_sigmas = (float)a[13].number, wild_kept = (float)a[14].number, most = (float)a[15].number;
    float huge_sigmas = (float)a[16].number, allowance = (float)a[17].number;
    int any_wild = a[18].whole != 0;
    int64_t *at = (int64_t *)a[19].data;
    float largest = 0.0f;
    int32_t odd[BLOCK];
    int sure = 0, fits = a[19].n >= r * n && (a[1].data == NULL || a[1].k == r);
    for (int j = 2; j < 10; j++) fits &= a[j].k == r;
    if (!fits) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t row = 0; row < r; row++) {
        float *z = ROW(float, a[0], row), *mean = ROW(float, a[2], row), *last = ROW(float, a[3], row);
        const uint8_t *fresh = a[1].data == NULL ? NULL : ROW(uint8_t, a[1], row), *live = ROW(uint8_t, a[4], row);
        for (Py_ssize_t from = 0; from < n; from += BLOCK) {
            Py_ssize_t m = n - from < BLOCK ? n - from : BLOCK;
            float most_here = deviate(m, z + from, fresh == NULL ? NULL : fresh + from, mean + from, last + from,
                                      live + from, farthest, share, off_sigmas, odd);
            largest = most_here > largest ? most_here : largest;
            for (Py_ssize_t i = 0; i < m; i++)
                if (odd[i]) at[counted++] = row * n + from + i;
        }
    }
    any_wild |= largest > wild_sigmas;
    for (Py_ssize_t c = 0; c < counted; c++) {
        Py_ssize_t row = at[c] / n, i = at[c] % n;
        float one = ROW(float, a[0], row)[i], mean = ROW(float, a[2], row)[i], size = fabsf(one);
        int16_t *streak = ROW(int16_t, a[8], row) + i;
        float side = mean > 0.0f ? 1.0f : mean < 0.0f ? -1.0f : 0.0f;
        int many = *streak + 1;
        many = one * side > off_sigmas ? (many < 999 ? many : 999) : 0;
        *streak = (int16_t)many;
        int lives = many > 0;
        if (any_wild) {
            float *wild = ROW(float, a[7], row) + i, kept = *wild * wild_kept + (float)(size > wild_sigmas);
            kept = kept < 0.01f ? 0.0f : kept;
            *wild = kept;
            lives |= kept > 0.0f;
        }
        float step = one < -most ? -most : one > most ? most : one;
        float certain = ROW(float, a[9], row)[i];
        if (size > huge_sigmas) step = copysignf(allowance + certain, one);
        float *above = ROW(float, a[5], row) + i, *below = ROW(float, a[6], row) + i, cap = 2.0f * certain;
        float up = (*above + step) - allowance, down = (*below - step) - allowance;
        up = up > 0.0f ? up : 0.0f;
        down = down > 0.0f ? down : 0.0f;
        up = up < cap ? up : cap;
        down = down < cap ? down : cap;
        *above = up;
        *below = down;
        sure |= (up >= certain) | (down >= certain);
        ROW(uint8_t, a[4], row)[i] = (uint8_t)(lives | (up > 0.0f) | (down > 0.0f));
    }
    release(args, count);
    return Py_BuildValue("din", (double)largest, sure, counted);
}

#define CLIP(x, low, high) MINIMUM(MAXIMUM(x, low), high)

KERNEL(narrow) {
    TAKE("iddd?b*D*D*D*D*I*d*d*d::");
    const Arg *a = args;
    Py_ssize_t all = a[5].n;
    for (int k = 6; k < 13; k++)
        if (a[k].n != all) return refuse(__func__, "arrays do not fit", args, count);
    const int32_t *index = (int32_t *)a[0].data;
    const uint8_t *allowed = (uint8_t *)a[4].data;
    const double *bottom = (double *)a[1].data, *top = (double *)a[2].data, *wish = (double *)a[3].data;
    double *lo = (double *)a[5].data, *hi = (double *)a[6].data, *want = (double *)a[7].data, *value = (double *)a[8].data;
    int32_t *by = (int32_t *)a[9].data, number = (int32_t)a[13].whole;
    const double *leased = (double *)a[10].data, *readback = (double *)a[11].data, *safe = (double *)a[12].data;
    for (Py_ssize_t i = 0; i < n; i++)
        if (index[i] < 0 || index[i] >= all) return refuse(__func__, "entities do not fit", args, count);
    int64_t lost = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int32_t at = index[i];
        double was_lo = lo[at], was_hi = hi[at];
        if (!isfinite(was_lo) || (allowed != NULL && !allowed[i])) continue;
        double new_lo = CLIP(bottom[i], was_lo, was_hi), new_hi = CLIP(top[i], was_lo, was_hi);
        double wished = CLIP(wish[i], bottom[i], top[i]);
        lost += (top[i] < was_lo) | (bottom[i] > was_hi) | (wished < new_lo) | (wished > new_hi);
        lo[at] = new_lo;
        hi[at] = new_hi;
        if (want[at] != want[at]) want[at] = wish[i];
        double stands = leased[at] != leased[at] ? readback[at] : leased[at];
        double wanted = want[at] != want[at] ? stands : want[at];
        if (wanted != wanted) wanted = safe[at];
        wanted = CLIP(wanted, new_lo, new_hi);
        if (a[14].whole) wanted = nearbyint(wanted);
        if (value[at] != value[at] || wanted != value[at]) by[at] = number;
        value[at] = wanted;
    }
    release(args, count);
    return PyLong_FromLongLong(lost);
}

/* States of a lease (`twin.control.leases`). */
#define LEASE_DONE 4
#define IS_WAITING(state) ((state) >= 1 && (state) <= 3)

KERNEL(limit_moves) {
    TAKE("DBddddddddb..:::");
    const Arg *a = args;
    double *value = (double *)a[0].data, dt_s = a[11].number, deadband = a[12].number;
    uint8_t *change = (uint8_t *)a[1].data, *known = (uint8_t *)a[10].data;
    const double *leased = (double *)a[2].data, *read = (double *)a[3].data, *low = (double *)a[4].data;
    const double *high = (double *)a[5].data, *safe = (double *)a[6].data, *lo = (double *)a[7].data;
    const double *hi = (double *)a[8].data, *slew_per_s = (double *)a[9].data;
    int64_t held = a[13].whole, towards = a[14].whole, disruptive = a[15].whole;
#define PROTECTS(to, from) (towards < 0 ? (to) < (from) : towards > 0 && !disruptive && (to) > (from))
    for (Py_ssize_t i = 0; i < n; i++) {
        double to = value[i];
        change[i] = 0;
        if (to != to) continue;
        int running = leased[i] == leased[i];
        double stands = running ? leased[i] : read[i] != read[i] ? safe[i] : read[i];
        int protective = PROTECTS(to, stands);
        if (held) {
            protective |= !running && !known[i] && PROTECTS(to, towards < 0 ? high[i] : low[i]);
            if (!protective) to = leased[i];
        }
        int touched = to == to;
        if (touched && leased[i] >= lo[i] && leased[i] <= hi[i] && fabs(to - leased[i]) < deadband) to = leased[i];
        double reach = slew_per_s[i] > 0.0 ? slew_per_s[i] * dt_s : INFINITY;
        stands = MAXIMUM(stands, low[i]);
        stands = MINIMUM(stands, high[i]);
        if (touched && !protective && isfinite(stands)) {
            double least = stands - reach, most = stands + reach;
            to = MAXIMUM(to, least);
            to = MINIMUM(to, most);
        }
        value[i] = to;
        change[i] = touched && to != (running ? leased[i] : read[i]) && (disruptive || !protective);
    }
#undef PROTECTS
    DONE;
}

KERNEL(compare_readbacks) {
    TAKE("dqBQBdqI.:::");
    const Arg *a = args;
    const double *value = (double *)a[0].data, *readback = (double *)a[5].data;
    const int64_t *issued_ns = (int64_t *)a[1].data, *heard_ns = (int64_t *)a[6].data;
    uint8_t *state = (uint8_t *)a[2].data, *seen = (uint8_t *)a[4].data;
    int64_t *differs_ns = (int64_t *)a[3].data, now_ns = a[9].whole, slow_ns = a[10].whole, wait_ns = a[11].whole;
    int32_t *at = (int32_t *)a[7].data;
    double tolerance = a[8].number;
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t since = 0;
        if (value[i] == value[i]) {
            int current = heard_ns[i] > issued_ns[i];
            int agrees = current && fabs(readback[i] - value[i]) <= tolerance;
            seen[i] |= (uint8_t)agrees;
            if (agrees && IS_WAITING(state[i])) state[i] = LEASE_DONE;
            int differs = current && !agrees && !(IS_WAITING(state[i]) && now_ns - issued_ns[i] < slow_ns);
            since = differs ? (differs_ns[i] == 0 ? now_ns : differs_ns[i]) : current ? 0 : differs_ns[i];
        }
        differs_ns[i] = since;
        if (since > 0 && now_ns - since >= wait_ns) at[found++] = (int32_t)i;
    }
    release(args, count);
    return PyLong_FromSsize_t(found);
}

KERNEL(power_at_level) {
    TAKE("qdD*D*d*d*d*q..");
    const Arg *a = args;
    const int64_t *group = (int64_t *)a[0].data, *first = (int64_t *)a[7].data;
    const double *level = (double *)a[1].data, *key = (double *)a[4].data;
    const double *room_w = (double *)a[5].data, *weight = (double *)a[6].data;
    double *power_w = (double *)a[2].data, *slope = (double *)a[3].data, top = a[8].number, scale = a[9].number;
    Py_ssize_t devices = a[4].n;
    if (a[3].n != n || a[5].n != devices + 1 || a[6].n != devices + 1)
        return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (group[i] < 0 || group[i] + 1 >= a[7].n) return refuse(__func__, "groups do not fit", args, count);
        int64_t from = first[group[i]], last = first[group[i] + 1], low = from, high = last;
        if (from < 0 || last < from || last > devices) return refuse(__func__, "groups do not fit", args, count);
        double at = (double)group[i] + MINIMUM(level[i], top) * scale;
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (key[middle] <= at) low = middle + 1;
            else high = middle;
        }
        double rise = weight[last] - weight[low];
        slope[i] = rise;
        power_w[i] = (room_w[low] - room_w[from]) + rise * level[i];
    }
    DONE;
}

/* The place of a name: the next of `paths`, or else as `known` has it, -1 for none; -2 with an error set. */
static Py_ssize_t place_of(PyObject *name, PyObject *known, PyObject *paths, Py_ssize_t next) {
    if (next < PyList_Size(paths)) {
        int same = PyObject_RichCompareBool(name, PyList_GetItem(paths, next), Py_EQ);
        if (same != 0) return same < 0 ? -2 : next;
    }
    PyObject *found = PyDict_GetItemWithError(known, name);
    if (found == NULL) return PyErr_Occurred() ? -2 : -1;
    long long at = PyLong_AsLongLong(found);
    return PyErr_Occurred() ? -2 : at;
}

KERNEL(find_places) {
    (void)self;
    if (count != 4 || !PyList_Check(given[0]) || !PyDict_Check(given[1]) || !PyList_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "find_places: expected a list, a dict, a list and an array");
        return NULL;
    }
    Arg out;
    Py_ssize_t n = PyList_Size(given[0]), next = 0, missing = 0;
    memset(&out, 0, sizeof(Arg));
    if (take_array(given[3], &out, 'i', 1, __func__, 3) < 0) {
        release(&out, 1);
        return NULL;
    }
    if (out.n != n || out.k != 1) return refuse(__func__, "arrays do not fit", &out, 1);
    int32_t *place = (int32_t *)out.data;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t at = place_of(PyList_GetItem(given[0], i), given[1], given[2], next);
        if (at < -1) {
            release(&out, 1);
            return NULL;
        }
        missing += at < 0;
        place[i] = (int32_t)at;
        next = at < 0 ? PyList_Size(given[2]) : at + 1;
    }
    release(&out, 1);
    return PyLong_FromSsize_t(missing);
}

/* The number of 1 to 18 digits behind a prefix; -1 for another text. */
static int64_t number_behind(const char *prefix, Py_ssize_t size, const char *text, Py_ssize_t length) {
    if (length <= size || length > size + 18 || memcmp(text, prefix, (size_t)size) != 0) return -1;
    int64_t number = 0;
    for (Py_ssize_t i = size; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') return -1;
        number = 10 * number + (text[i] - '0');
    }
    return number;
}

#define MOST_PARTS 7

/* Descriptors of attributes of a type, which are read without a look-up by name. */
typedef struct {
    PyObject *type, *descriptor[MOST_PARTS];
    descrgetfunc get[MOST_PARTS];
    int count;
} Parts;

static void drop_parts(Parts *parts) {
    for (int j = 0; j < parts->count; j++) Py_CLEAR(parts->descriptor[j]);
    parts->type = NULL;
}

static int find_parts(const char *name, PyObject *type, const char *const *attributes, Parts *parts) {
    drop_parts(parts);
    for (int j = 0; j < parts->count; j++) {
        parts->descriptor[j] = PyObject_GetAttrString(type, attributes[j]);
        if (parts->descriptor[j] == NULL) return -1;
        parts->get[j] = (descrgetfunc)PyType_GetSlot(Py_TYPE(parts->descriptor[j]), Py_tp_descr_get);
        if (parts->get[j] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s: expected objects with slots", name);
            return -1;
        }
    }
    parts->type = type;
    return 0;
}

/* Reads the attributes of an object; those that were read before a failure are to be dropped all the same. */
static int read_parts(const Parts *parts, PyObject *of, PyObject **value) {
    for (int j = 0; j < parts->count; j++) {
        value[j] = parts->get[j](parts->descriptor[j], of, parts->type);
        if (value[j] == NULL) return -1;
    }
    return 0;
}

static void drop_values(PyObject **value, int count) {
    for (int j = 0; j < count; j++) Py_CLEAR(value[j]);
}

/* Attributes of answers, in this order. */
static const char *const OF_ANSWER[] = {"id", "control", "command", "generation", "state", "name"};

/* The place of a text in a tuple, first where the one before it was; -1 for none, -2 with an error set. */
static Py_ssize_t place_in(PyObject *texts, PyObject *text, Py_ssize_t before) {
    for (Py_ssize_t k = 0, m = PyTuple_Size(texts); k < m; k++) {
        Py_ssize_t at = (before + k) % m;
        int same = PyObject_RichCompareBool(text, PyTuple_GetItem(texts, at), Py_EQ);
        if (same != 0) return same < 0 ? -2 : at;
    }
    return -1;
}

KERNEL(read_answers) {
    (void)self;
    if (count != 10 || !PyList_Check(given[0]) || !PyUnicode_Check(given[2]) || !PyTuple_Check(given[3]) ||
        !PyDict_Check(given[4]) || !PyList_Check(given[5])) {
        PyErr_SetString(PyExc_TypeError, "read_answers: expected a list, two texts, a tuple, a dict, a list and four arrays");
        return NULL;
    }
    Arg out[4];
    Py_ssize_t n = PyList_Size(given[0]), size, length, next = 0, before = 0, named = 0;
    Parts parts;
    memset(out, 0, sizeof(out));
    memset(&parts, 0, sizeof(parts));
    parts.count = sizeof(OF_ANSWER) / sizeof(OF_ANSWER[0]);
    const char *prefix = PyUnicode_AsUTF8AndSize(given[2], &size);
    int failed = prefix == NULL, plain = n > 0;
    for (int j = 0; j < 4 && !failed; j++) failed = take_array(given[6 + j], &out[j], "iqqb"[j], 1, __func__, 6 + j) < 0;
    for (int j = 0; j < 4 && !failed; j++)
        if (out[j].n != n || out[j].k != 1) return refuse(__func__, "arrays do not fit", out, 4);
    int32_t *place = (int32_t *)out[0].data;
    int64_t *generation = (int64_t *)out[1].data, *number = (int64_t *)out[2].data;
    uint8_t *state = (uint8_t *)out[3].data;
    PyObject *type = n > 0 ? (PyObject *)Py_TYPE(PyList_GetItem(given[0], 0)) : NULL;
    if (!failed && n > 0) failed = find_parts(__func__, type, OF_ANSWER, &parts) < 0;
    for (Py_ssize_t i = 0; i < n && plain && !failed; i++) {
        PyObject *event = PyList_GetItem(given[0], i), *value[MOST_PARTS] = {NULL};
        plain = (PyObject *)Py_TYPE(event) == type;
        if (plain) failed = read_parts(&parts, event, value) < 0;
        if (plain && !failed) {
            int with_id = PyObject_IsTrue(value[0]);
            int same = PyObject_RichCompareBool(value[1], given[1], Py_EQ);
            const char *text = PyUnicode_AsUTF8AndSize(value[2], &length);
            if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) PyErr_Clear(); /* no digit */
            int over = 0;
            long long which = PyLong_AsLongLongAndOverflow(value[3], &over);
            Py_ssize_t how = place_in(given[3], value[4], before), at = place_of(value[5], given[4], given[5], next);
            failed = PyErr_Occurred() != NULL;
            number[i] = text == NULL ? -1 : number_behind(prefix, size, text, length);
            plain = same && number[i] >= 0 && over == 0 && which >= 0 && which <= INT32_MAX && how >= 0;
            named += with_id;
            place[i] = (int32_t)at, generation[i] = which, state[i] = (uint8_t)how;
            before = how < 0 ? 0 : how;
            next = at < 0 ? PyList_Size(given[5]) : at + 1;
        }
        drop_values(value, parts.count);
    }
    drop_parts(&parts);
    for (int j = 0; j < 4 && !plain; j++) memset(out[j].data, 0, (size_t)n * (size_t)out[j].buffer.itemsize);
    release(out, 4);
    return failed ? NULL : PyLong_FromSsize_t(plain ? named : -1);
}

/* ---- reports of faults ------------------------------------------------------------------------------- */

static uint64_t little(const uint8_t *at) {
    uint64_t out = 0;
    for (int i = 7; i >= 0; i--) out = out << 8 | at[i];
    return out;
}

#define MOST_COUNT 65535 /* in a bucket */

#define TURN(x, by) ((x) >> (by) | (x) << (64 - (by)))
#define MIX(a, b, c, d, x, y)                                                                                      \
    a += b + (x), d = TURN(d ^ a, 32), c += d, b = TURN(b ^ c, 24);                                                \
    a += b + (y), d = TURN(d ^ a, 16), c += d, b = TURN(b ^ c, 63)

static const uint64_t BLAKE_IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};
static const uint8_t BLAKE_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

/* BLAKE2b without a key (RFC 7693), of 8 bytes, as a number. */
static uint64_t blake_of(const uint8_t *text, size_t size) {
    uint64_t h[8], v[16], m[16];
    memcpy(h, BLAKE_IV, sizeof(h));
    h[0] ^= 0x01010000u ^ 8u;
    for (size_t at = 0, last = 0; !last;) {
        uint8_t block[128] = {0};
        size_t many = size - at < sizeof(block) ? size - at : sizeof(block);
        memcpy(block, text + at, many);
        at += many;
        last = at == size;
        for (int i = 0; i < 16; i++) m[i] = little(block + 8 * i);
        memcpy(v, h, sizeof(h));
        memcpy(v + 8, BLAKE_IV, sizeof(h));
        v[12] ^= at;
        if (last) v[14] = ~v[14];
        for (int round = 0; round < 12; round++) {
            const uint8_t *o = BLAKE_ORDER[round % 10];
            MIX(v[0], v[4], v[8], v[12], m[o[0]], m[o[1]]);
            MIX(v[1], v[5], v[9], v[13], m[o[2]], m[o[3]]);
            MIX(v[2], v[6], v[10], v[14], m[o[4]], m[o[5]]);
            MIX(v[3], v[7], v[11], v[15], m[o[6]], m[o[7]]);
            MIX(v[0], v[5], v[10], v[15], m[o[8]], m[o[9]]);
            MIX(v[1], v[6], v[11], v[12], m[o[10]], m[o[11]]);
            MIX(v[2], v[7], v[8], v[13], m[o[12]], m[o[13]]);
            MIX(v[3], v[4], v[9], v[14], m[o[14]], m[o[15]]);
        }
        for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
    }
    return h[0];
}

/* The checksum of zlib, begun and ended by its complement. */
static uint32_t crc_on(uint32_t crc, const char *text, Py_ssize_t size) {
    static uint32_t step[256];
    if (step[1] == 0)
        for (uint32_t i = 0; i < 256; i++) {
            step[i] = i;
            for (int bit = 0; bit < 8; bit++) step[i] = step[i] >> 1 ^ (step[i] & 1 ? 0xedb88320u : 0u);
        }
    for (Py_ssize_t i = 0; i < size; i++) crc = crc >> 8 ^ step[(crc ^ (uint8_t)text[i]) & 0xff];
    return crc;
}

/* The bytes of a text, halves of surrogates included; `held` is to be dropped when they were read. */
static const char *bytes_of(PyObject *text, Py_ssize_t *size, PyObject **held) {
    const char *out = PyUnicode_AsUTF8AndSize(text, size);
    *held = NULL;
    if (out != NULL || !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return out;
    PyErr_Clear();
    char *bytes = NULL;
    *held = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    return *held == NULL || PyBytes_AsStringAndSize(*held, &bytes, size) < 0 ? NULL : bytes;
}

static int crc_on_text(uint32_t *crc, PyObject *text, const char *end) {
    Py_ssize_t size;
    PyObject *held;
    const char *bytes = bytes_of(text, &size, &held);
    if (bytes != NULL) *crc = crc_on(crc_on(*crc, bytes, size), end, (Py_ssize_t)strlen(end));
    Py_XDECREF(held);
    return bytes == NULL ? -1 : 0;
}

static int crc_on_number(uint32_t *crc, PyObject *number, int64_t whole) {
    char digits[24], *at = digits + sizeof(digits);
    if (whole < 0 || !PyLong_CheckExact(number)) { /* as it writes itself */
        PyObject *text = PyObject_Format(number, NULL);
        int failed = text == NULL || crc_on_text(crc, text, " ") < 0;
        Py_XDECREF(text);
        return failed ? -1 : 0;
    }
    *--at = ' ';
    do *--at = (char)('0' + whole % 10);
    while ((whole /= 10) > 0);
    *crc = crc_on(*crc, at, digits + sizeof(digits) - at);
    return 0;
}

/* A number of 63 bits; -1 for one of more. */
static int64_t whole_of(PyObject *number) {
    int over = 0;
    long long out = PyLong_AsLongLongAndOverflow(number, &over);
    return over != 0 ? -1 : out;
}

/* Attributes of faults, in this order; the first three are columns. */
static const char *const OF_FAULT[] = {"code", "count", "at_ns", "id", "table", "name", "detail"};

static int read_fault(PyObject **value, Arg *out, Py_ssize_t i, PyObject *tables, Py_ssize_t *before) {
    for (int j = 0; j < 3; j++) ROW(int64_t, out[1], j)[i] = whole_of(value[j]);
    Py_ssize_t at = place_in(tables, value[4], *before), size = 0;
    if (PyErr_Occurred()) return -1;
    ((uint8_t *)out[0].data)[i] = (uint8_t)(at < 0 ? 255 : at);
    *before = at < 0 ? 0 : at;
    PyObject *held;
    const char *id = bytes_of(value[3], &size, &held);
    uint64_t key = id == NULL || size == 0 ? 0 : blake_of((const uint8_t *)id, (size_t)size);
    Py_XDECREF(held);
    if (id == NULL) return -1;
    memcpy((int64_t *)out[2].data + i, &key, sizeof(key));
    uint32_t crc = ~0u;
    if (size > 0 && (crc_on_number(&crc, value[0], ROW(int64_t, out[1], 0)[i]) < 0 ||
                     crc_on_number(&crc, value[1], ROW(int64_t, out[1], 1)[i]) < 0 ||
                     crc_on_text(&crc, value[4], "\n") < 0 || crc_on_text(&crc, value[5], "\n") < 0 ||
                     crc_on_text(&crc, value[6], "") < 0))
        return -1;
    ((int64_t *)out[3].data)[i] = size > 0 ? (int64_t)(uint32_t)~crc : -1;
    return 0;
}

KERNEL(read_faults) {
    (void)self;
    if (count != 6 || !PyList_Check(given[0]) || !PyTuple_Check(given[1]) || PyTuple_Size(given[1]) > 255) {
        PyErr_SetString(PyExc_TypeError, "read_faults: expected a list, a tuple of texts and four arrays");
        return NULL;
    }
    Arg out[4];
    Parts parts;
    Py_ssize_t n = PyList_Size(given[0]), before = 0;
    memset(out, 0, sizeof(out));
    memset(&parts, 0, sizeof(parts));
    parts.count = sizeof(OF_FAULT) / sizeof(OF_FAULT[0]);
    for (int j = 0; j < 4; j++)
        if (take_array(given[2 + j], &out[j], "bqqq"[j], 1, __func__, 2 + j) < 0) {
            release(out, 4);
            return NULL;
        }
    for (int j = 0; j < 4; j++)
        if (out[j].n != n || out[j].k != (j == 1 ? 3 : 1)) return refuse(__func__, "arrays do not fit", out, 4);
    PyObject *names = PyList_New(n);
    int failed = names == NULL;
    for (Py_ssize_t i = 0; i < n && !failed; i++) {
        PyObject *event = PyList_GetItem(given[0], i), *value[MOST_PARTS] = {NULL};
        PyObject *type = (PyObject *)Py_TYPE(event);
        if (type != parts.type) failed = find_parts(__func__, type, OF_FAULT, &parts) < 0;
        failed = failed || read_parts(&parts, event, value) < 0 || read_fault(value, out, i, given[1], &before) < 0;
        if (!failed) {
            Py_INCREF(value[5]);
            PyList_SetItem(names, i, value[5]);
        }
        drop_values(value, parts.count);
    }
    drop_parts(&parts);
    release(out, 4);
    if (failed) Py_CLEAR(names);
    return names;
}

/* Puts the newest of one pair into its ring, which ascends by instants: the oldest goes. */
static void push_fault(const Arg *rings, int64_t pair, int64_t at_ns, int64_t received_ns, int32_t times) {
    Py_ssize_t j = 0, kept = rings[0].k;
    if (kept == 0 || at_ns < ROW(int64_t, rings[0], 0)[pair]) return;
    for (; j + 1 < kept && ROW(int64_t, rings[0], j + 1)[pair] <= at_ns; j++) {
        ROW(int64_t, rings[0], j)[pair] = ROW(int64_t, rings[0], j + 1)[pair];
        ROW(int64_t, rings[1], j)[pair] = ROW(int64_t, rings[1], j + 1)[pair];
        ROW(int32_t, rings[2], j)[pair] = ROW(int32_t, rings[2], j + 1)[pair];
    }
    ROW(int64_t, rings[0], j)[pair] = at_ns;
    ROW(int64_t, rings[1], j)[pair] = received_ns;
    ROW(int32_t, rings[2], j)[pair] = times;
}

KERNEL(keep_newest) {
    TAKE("qiqqb*Q*Q*IB:");
    const Arg *a = args, *rings = args + 5;
    const int64_t *order = (int64_t *)a[0].data, *at_ns = (int64_t *)a[2].data, *times = (int64_t *)a[3].data;
    const int32_t *pair = (int32_t *)a[1].data;
    const uint8_t *dated = (uint8_t *)a[4].data;
    uint8_t *fresh = (uint8_t *)a[8].data;
    for (int j = 1; j < 3; j++)
        if (rings[j].k != rings[0].k || rings[j].n != rings[0].n)
            return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t i = 0; i < n; i++)
        if (order[i] < 0 || order[i] >= n || pair[i] < 0 || pair[i] >= rings[0].n)
            return refuse(__func__, "places do not fit", args, count);
    for (Py_ssize_t i = 0, end = 0; i < n; i = end) {
        int64_t of = pair[order[i]], last_ns = 0;
        int any = 0; /* dated before, at last_ns */
        for (; end < n && pair[order[end]] == of; end++) {
            int64_t one = order[end];
            int again = any && at_ns[one] == last_ns;
            for (Py_ssize_t j = 0; j < rings[0].k && !again; j++) again = ROW(int64_t, rings[0], j)[of] == at_ns[one];
            fresh[one] = !(dated[one] && again);
            if (dated[one]) any = 1, last_ns = at_ns[one];
        }
        for (Py_ssize_t k = i; k < end; k++)
            if (fresh[order[k]]) push_fault(rings, of, at_ns[order[k]], a[9].whole, (int32_t)times[order[k]]);
    }
    DONE;
}

KERNEL(count_faults) {
    TAKE("iqqibb*H*Q*Q::");
    const Arg *a = args;
    const int32_t *pair = (int32_t *)a[0].data, *entity = (int32_t *)a[3].data;
    const int64_t *at_ns = (int64_t *)a[1].data, *times = (int64_t *)a[2].data;
    const uint8_t *fresh = (uint8_t *)a[4].data, *counted = (uint8_t *)a[5].data;
    int64_t *sums = (int64_t *)a[7].data, *total = (int64_t *)a[8].data;
    int64_t every_ns = a[9].whole, now_ns = a[10].whole, many = a[6].k;
    if (a[6].n != a[7].n || every_ns <= 0 || now_ns < 0) return refuse(__func__, "arrays do not fit", args, count);
    for (Py_ssize_t i = 0; i < n; i++)
        if (pair[i] < 0 || pair[i] >= a[7].n || entity[i] < 0 || entity[i] >= a[8].n || at_ns[i] < 0)
            return refuse(__func__, "places do not fit", args, count);
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t number = at_ns[i] / every_ns;
        if (!fresh[i] || now_ns / every_ns - number >= many) continue;
        uint16_t *cell = ROW(uint16_t, a[6], number % many) + pair[i];
        int64_t before = *cell, after = before + times[i];
        *cell = (uint16_t)(after < MOST_COUNT ? after : MOST_COUNT);
        sums[pair[i]] += *cell - before;
        if (counted[i]) total[entity[i]] += *cell - before;
    }
    DONE;
}

static PyMethodDef methods[] = {
#define NAMED(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
    NAMED(learn_noise), NAMED(learn_fit), NAMED(fit_sigma), NAMED(hold_power), NAMED(follow_heat), NAMED(far_off), NAMED(fill_nan), NAMED(joint),
    NAMED(follow_steps), NAMED(move_lags), NAMED(beyond), NAMED(expect_power), NAMED(expect_clock), NAMED(compare_linear), NAMED(teach_linear), NAMED(doubt_moves), NAMED(unaccounted), NAMED(learn_cadence),
    NAMED(first_arrival), NAMED(count_up), NAMED(stage_block), NAMED(enters), NAMED(falls), NAMED(latch), NAMED(latch_counts), NAMED(quantise), NAMED(watch_gauges), NAMED(add_deviations),
    NAMED(narrow), NAMED(limit_moves), NAMED(compare_readbacks), NAMED(power_at_level), NAMED(find_places), NAMED(read_answers), NAMED(read_faults),
    NAMED(keep_newest), NAMED(count_faults),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddStringConstant(made, "SOURCE", RACKTWIN_SOURCE) < 0) Py_CLEAR(made);
    return made;
}
