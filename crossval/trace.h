/* Writes a run of your engine as a trace, for `bitnet-ref crossval trace MODEL FILE`. C99 or C++; paste it into your program.

   trace_begin, then trace_add for each tensor as it is computed, then trace_end. Names: crossval/README.md.
   Data goes to the file at once; the header of the safetensors format goes into space that was left for it. */
#ifndef BITNET_REF_TRACE_H
#define BITNET_REF_TRACE_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define TRACE_HEADER_BYTES (1 << 20) /* about 8,000 tensors */

struct trace {
    FILE *file;
    char *header;
    size_t length; /* of the header's text */
    uint64_t end;  /* of the data */
    int failed;
};

static void trace_print(struct trace *t, const char *format, ...) {
    va_list values;
    va_start(values, format);
    if (!t->failed) {
        size_t room = TRACE_HEADER_BYTES - t->length;
        int length = vsnprintf(t->header + t->length, room, format, values);
        t->failed = length < 0 || (size_t)length >= room;
        t->length += t->failed ? 0 : (size_t)length;
    }
    va_end(values);
}

static void trace_print_list(struct trace *t, const char *key, const int *values, int count) {
    trace_print(t, ", \"%s\": \"[", key);
    for (int i = 0; i < count; i++) trace_print(t, i ? ", %d" : "%d", values[i]);
    trace_print(t, "]\"");
}

/* engine: your program's name and version, without quotes or backslashes.
   calls: how many tokens each call of your engine computed, {16, 1, 1}.   sequences: how many tokens each sequence has,
   where the run has several, laid end to end. A count of 0 leaves either out; they are not given together. */
static void trace_begin_calls(struct trace *t, const char *path, const char *engine, const int *tokens, int n_tokens,
                              const int *calls, int n_calls, const int *sequences, int n_sequences) {
    t->length = 0, t->end = 0;
    t->header = (char *)malloc(TRACE_HEADER_BYTES);
    t->file = fopen(path, "wb");
    t->failed = !t->header || !t->file || fseek(t->file, 8 + TRACE_HEADER_BYTES, SEEK_SET) != 0;
    trace_print(t, "{\"__metadata__\": {\"format\": \"bitnet_ref.trace\", \"version\": \"1\", \"engine\": \"%s\"", engine);
    trace_print(t, ", \"engine_dtype\": \"float32\"");
    trace_print_list(t, "token_ids", tokens, n_tokens);
    if (n_calls > 0) trace_print_list(t, "calls", calls, n_calls);
    if (n_sequences > 0) trace_print_list(t, "sequences", sequences, n_sequences);
    trace_print(t, "}");
}

/* A run of one sequence in one call. */
static inline void trace_begin(struct trace *t, const char *path, const char *engine, const int *tokens, int n_tokens) {
    trace_begin_calls(t, path, engine, tokens, n_tokens, NULL, 0, NULL, 0);
}

/* dtype: "F32", "F16", "BF16", "I8", "I32". The tensor is (rows, columns) or, where depth > 0, (depth, rows, columns).
   The data is little-endian, in C order, without holes. */
static void trace_add(struct trace *t, const char *name, const char *dtype, const void *data, int64_t depth,
                      int64_t rows, int64_t columns) {
    int width = dtype[1] == '8' ? 1 : dtype[1] == '3' ? 4 : 2;
    uint64_t bytes = (uint64_t)(depth > 0 ? depth : 1) * (uint64_t)rows * (uint64_t)columns * (uint64_t)width;
    trace_print(t, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [", name, dtype);
    if (depth > 0) trace_print(t, "%" PRId64 ", ", depth);
    trace_print(t, "%" PRId64 ", %" PRId64 "], \"data_offsets\": [%" PRIu64 ", ", rows, columns, t->end);
    trace_print(t, "%" PRIu64 "]}", t->end + bytes);
    if (!t->failed) t->failed = fwrite(data, 1, bytes, t->file) != bytes;
    t->end += bytes;
}

/* -> 0, or -1 if anything could not be written. */
static int trace_end(struct trace *t) {
    unsigned char prefix[8];
    trace_print(t, "}");
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)((uint64_t)TRACE_HEADER_BYTES >> (8 * i));
    if (!t->failed) {
        for (size_t i = t->length; i < TRACE_HEADER_BYTES; i++) t->header[i] = ' ';
        t->failed = fseek(t->file, 0, SEEK_SET) != 0 || fwrite(prefix, 1, 8, t->file) != 8 ||
                    fwrite(t->header, 1, TRACE_HEADER_BYTES, t->file) != TRACE_HEADER_BYTES;
    }
    if (t->file && fclose(t->file) != 0) t->failed = 1;
    free(t->header);
    return t->failed ? -1 : 0;
}

#endif
