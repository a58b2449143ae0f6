/* A client of the C interface, as a C or C++ node would be one. The tests compile it as C11 and as C++17 and load it
 * into the process that holds the session. */
#include "flashrt_contract.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

#ifdef __cplusplus
#define EXPORT extern "C"
#else
#define EXPORT
#endif

/* ---- A whole decision ------------------------------------------------------------------------------------------ */

typedef struct decision {
    const flashrt_contract *contract;
    const uint8_t *pixels;
    uint64_t count;
    float *actions;
    uint64_t capacity; /* floats */
    flashrt_status status;
} decision;

static flashrt_status show(const flashrt_contract *contract, const uint8_t *pixels, uint64_t count)
{
    uint32_t image = 0;
    void *window = NULL;
    flashrt_status status = flashrt_find_buffer(contract, "image", &image);
    if (status != FLASHRT_OK) return status;
    status = flashrt_begin_fill(contract, image, &window);
    if (status != FLASHRT_OK) return status;
    memcpy(window, pixels, count);
    return flashrt_filled(contract, image, count);
}

EXPORT flashrt_status client_decide(const flashrt_contract *contract, const uint8_t *pixels, uint64_t count,
                                    float *actions, uint64_t capacity)
{
    uint32_t buffer = 0;
    flashrt_status status = flashrt_contract_check(contract, FLASHRT_ABI_VERSION);
    if (status == FLASHRT_OK) status = show(contract, pixels, count);
    if (status == FLASHRT_OK) status = flashrt_act(contract);
    if (status == FLASHRT_OK) status = flashrt_find_buffer(contract, "actions", &buffer);
    if (status != FLASHRT_OK) return status;
    if (contract->buffers[buffer].dtype != FLASHRT_DTYPE_FLOAT32) return FLASHRT_DOES_NOT_FIT;
    if (contract->buffers[buffer].nbytes != capacity * sizeof *actions) return FLASHRT_DOES_NOT_FIT;
    return flashrt_read(contract, buffer, 0, contract->buffers[buffer].nbytes, actions);
}

static void *decide_there(void *argument)
{
    decision *what = (decision *)argument;
    what->status = client_decide(what->contract, what->pixels, what->count, what->actions, what->capacity);
    return NULL;
}

/* The same in a thread that Python has never seen. */
EXPORT flashrt_status client_decide_in_a_thread(const flashrt_contract *contract, const uint8_t *pixels, uint64_t count,
                                                float *actions, uint64_t capacity)
{
    decision what = {contract, pixels, count, actions, capacity, FLASHRT_FAILED};
    pthread_t thread;
    if (pthread_create(&thread, NULL, decide_there, &what) != 0) return FLASHRT_FAILED;
    if (pthread_join(thread, NULL) != 0) return FLASHRT_FAILED;
    return what.status;
}

/* Ctrl-C while C code runs: Python's handler is due at the first line of Python that runs next. */
EXPORT flashrt_status client_act_after_ctrl_c(const flashrt_contract *contract)
{
    if (raise(SIGINT) != 0) return FLASHRT_FAILED;
    return flashrt_act(contract);
}

/* ---- What a client sees ---------------------------------------------------------------------------------------- */

typedef struct page {
    char *text;
    size_t capacity;
    size_t used;
} page;

static void print(page *out, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    int length = vsnprintf(out->text + out->used, out->capacity - out->used, format, values);
    va_end(values);
    if (length > 0) out->used += (size_t)length;
    if (out->used >= out->capacity) out->used = out->capacity - 1;
}

static void print_names(page *out, const flashrt_contract *contract, const uint32_t *indices, uint32_t count)
{
    for (uint32_t i = 0; i < count; ++i) print(out, " %s", contract->buffers[indices[i]].name);
}

static void print_buffer(page *out, const flashrt_buffer *buffer)
{
    print(out, "buffer %s role %" PRIu32 " rate %" PRIu32 " dtype %" PRIu32 " host %" PRIu32 " bytes %" PRIu64 " shape",
          buffer->name, buffer->role, buffer->rate, buffer->dtype, buffer->filled_by_host, buffer->nbytes);
    for (uint32_t i = 0; i < buffer->rank; ++i) print(out, " %" PRIu64, buffer->shape[i]);
    print(out, "\n");
}

/* The whole plan as text. */
EXPORT void client_describe(const flashrt_contract *contract, char *text, uint64_t capacity)
{
    page out = {text, (size_t)capacity, 0};
    print(&out, "contract %s %s device %" PRIu32 " %" PRIu32 "\n", contract->name, contract->fingerprint,
          contract->device_type, contract->device_index);
    for (uint32_t i = 0; i < contract->buffer_count; ++i) print_buffer(&out, &contract->buffers[i]);
    for (uint32_t i = 0; i < contract->stage_count; ++i) {
        const flashrt_stage *stage = &contract->stages[i];
        print(&out, "stage %s rate %" PRIu32 " reads", stage->name, stage->rate);
        print_names(&out, contract, stage->reads, stage->read_count);
        print(&out, " writes");
        print_names(&out, contract, stage->writes, stage->write_count);
        print(&out, "\n");
    }
    for (uint32_t i = 0; i < contract->region_count; ++i) {
        const flashrt_region *region = &contract->regions[i];
        print(&out, "region %s of %s at %" PRIu64 " bytes %" PRIu64 " blocks %" PRIu64 " rows %" PRIu64 " of %" PRIu64
              " live %s\n", region->name, contract->buffers[region->buffer].name, region->offset, region->nbytes,
              region->blocks, region->rows, region->row_bytes, region->live_extent ? region->live_extent : "-");
    }
}

/* The live rows of a region, block after block. */
EXPORT flashrt_status client_read_live(const flashrt_contract *contract, const char *name, uint8_t *target,
                                       uint64_t *count)
{
    uint32_t index = 0;
    uint64_t rows = 0;
    flashrt_status status = flashrt_find_region(contract, name, &index);
    if (status == FLASHRT_OK) status = flashrt_live_rows(contract, index, &rows);
    if (status != FLASHRT_OK) return status;
    const flashrt_region *region = &contract->regions[index];
    uint64_t live = rows * region->row_bytes;
    *count = 0;
    for (uint64_t block = 0; block < region->blocks && live > 0; ++block) {
        uint64_t start = region->offset + block * (region->nbytes / region->blocks);
        status = flashrt_read(contract, region->buffer, start, live, target + *count);
        if (status != FLASHRT_OK) return status;
        *count += live;
    }
    return FLASHRT_OK;
}

/* ---- One call at a time ---------------------------------------------------------------------------------------- */

EXPORT flashrt_status client_check(const flashrt_contract *c, uint32_t version)
{
    return flashrt_contract_check(c, version);
}

EXPORT flashrt_status client_find_buffer(const flashrt_contract *c, const char *name, uint32_t *buffer)
{
    return flashrt_find_buffer(c, name, buffer);
}

EXPORT flashrt_status client_find_region(const flashrt_contract *c, const char *name, uint32_t *region)
{
    return flashrt_find_region(c, name, region);
}

EXPORT flashrt_status client_begin_fill(const flashrt_contract *c, uint32_t buffer, void **address)
{
    return flashrt_begin_fill(c, buffer, address);
}

EXPORT flashrt_status client_filled(const flashrt_contract *c, uint32_t buffer, uint64_t rows)
{
    return flashrt_filled(c, buffer, rows);
}

EXPORT flashrt_status client_draw(const flashrt_contract *c, uint32_t buffer) { return flashrt_draw(c, buffer); }

EXPORT flashrt_status client_act(const flashrt_contract *c) { return flashrt_act(c); }

EXPORT flashrt_status client_read(const flashrt_contract *c, uint32_t buffer, uint64_t offset, uint64_t nbytes,
                                  void *target)
{
    return flashrt_read(c, buffer, offset, nbytes, target);
}

EXPORT flashrt_status client_version_of(const flashrt_contract *c, uint32_t buffer, uint64_t *version)
{
    return flashrt_version_of(c, buffer, version);
}

EXPORT flashrt_status client_live_rows(const flashrt_contract *c, uint32_t region, uint64_t *rows)
{
    return flashrt_live_rows(c, region, rows);
}

EXPORT flashrt_status client_last_error(const flashrt_contract *c, char *text, uint64_t capacity)
{
    return flashrt_last_error(c, text, capacity);
}
