/* flashrt_contract.h: the execution contract of a live session, for C and C++ code in the same process.
 *
 * The host process, which runs Python, makes a `CView` of its session and hands the address of the flashrt_contract
 * inside it to the C side. The C side checks it once and then calls the inline functions at the end of this file:
 *
 *     if (flashrt_contract_check(contract, FLASHRT_ABI_VERSION) != FLASHRT_OK) ...      once
 *     flashrt_find_buffer(contract, "image.front", &image);                             once
 *     flashrt_begin_fill(contract, image, &address);                                    lends the window
 *     memcpy(address, pixels, count);
 *     flashrt_filled(contract, image, count);                                           takes it back, upload and all
 *     flashrt_act(contract);                                                            replays exactly what is stale
 *     flashrt_read(contract, actions, 0, sizeof chunk, chunk);                          refused while it is stale
 *
 * Nothing in these structures changes while they live, so they are const all the way down. A window is written
 * between flashrt_begin_fill and flashrt_filled only: in between nobody else can drive the session, and afterwards
 * the window's version has moved, so that no stage can miss the change.
 *
 * Lifetime. The structures, their strings and the callbacks live as long as the Python object `CView`, also after the
 * session was closed. From then on every callback answers FLASHRT_CLOSED, and the addresses of the buffers
 * point to memory that was released. Call nothing after the interpreter has begun to shut down.
 *
 * Threads. A call may come from any thread, also one that Python does not know; it waits for the interpreter's lock.
 * One thread at a time drives: another one gets FLASHRT_BUSY at once, as does Python.
 *
 * Growth. Within one FLASHRT_ABI_VERSION nothing moves, no number gets another meaning, and only flashrt_contract may
 * grow, at its end, which `struct_size` shows. Every other change raises FLASHRT_ABI_VERSION.
 *
 * C11 and C++11 or later, 64 bit. Nothing to link with.
 */
#ifndef FLASHRT_CONTRACT_H
#define FLASHRT_CONTRACT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if UINTPTR_MAX != UINT64_MAX
#error "flashrt_contract.h describes a layout with 64-bit pointers; compile for a 64-bit platform"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHRT_ABI_VERSION 1u

/* Name of the PyCapsule that carries a `const flashrt_contract *`, for code that includes Python.h. */
#define FLASHRT_CAPSULE_NAME "flashrt_ros.contract.v1"

/* ---- Numbers --------------------------------------------------------------------------------------------------- */

/* What every call answers. Unless it is FLASHRT_OK, nothing was done, except where said; flashrt_last_error has the
 * sentence to it. */
typedef int32_t flashrt_status;

enum flashrt_status_code {
    FLASHRT_OK = 0,
    FLASHRT_INTERRUPTED = 1,    /* Python broke off, or could not begin (Ctrl-C); what was under way is stale now, and
                                   it is time to return to the host */
    FLASHRT_FAILED = 2,         /* a stage, the device or the engine failed; what was under way is stale now */
    FLASHRT_WRONG_ABI = 3,      /* the host has another FLASHRT_ABI_VERSION than this header */
    FLASHRT_TOO_SMALL = 4,      /* the host's flashrt_contract lacks fields that this header knows */
    FLASHRT_BAD_ARGUMENT = 5,   /* a pointer is NULL, or `context` is not this contract's own */
    FLASHRT_UNKNOWN_BUFFER = 6, /* no buffer of that index or name */
    FLASHRT_UNKNOWN_REGION = 7, /* no region of that index or name */
    FLASHRT_NOT_A_WINDOW = 8,   /* the buffer is not one that the host fills */
    FLASHRT_DOES_NOT_FIT = 9,   /* more rows than the window has, or none; noise for a window that is not float32 */
    FLASHRT_NOT_BEGUN = 10,     /* flashrt_filled without the flashrt_begin_fill of the same buffer */
    FLASHRT_OUT_OF_RANGE = 11,  /* the bytes do not lie inside the buffer, or there are none */
    FLASHRT_STALE = 12,         /* the buffer follows from something that has changed since; call flashrt_act */
    FLASHRT_UNFILLED = 13,      /* a stage reads a window that was not filled since configure or restore */
    FLASHRT_BUSY = 14,          /* the session is being driven already, or a window is still being filled */
    FLASHRT_NOT_CONFIGURED = 15, /* the host has not configured the session yet */
    FLASHRT_CLOSED = 16         /* the session or the view was closed; release what you hold of it */
};

enum flashrt_device {
    FLASHRT_DEVICE_CPU = 0,
    FLASHRT_DEVICE_CUDA = 1
};

/* What a buffer is for. */
enum flashrt_role {
    FLASHRT_ROLE_STATIC = 0, /* prepared once, read-only afterwards */
    FLASHRT_ROLE_SWAP = 1,   /* a window that the host fills (`filled_by_host`) or reads */
    FLASHRT_ROLE_STATE = 2,  /* written by one stage, read by later ones, saved by capsules */
    FLASHRT_ROLE_SCRATCH = 3 /* private to its stage; worthless afterwards */
};

/* How often a value changes, slowest first. */
enum flashrt_rate {
    FLASHRT_RATE_CHECKPOINT = 0,
    FLASHRT_RATE_PROMPT = 1,
    FLASHRT_RATE_OBSERVATION = 2,
    FLASHRT_RATE_STEP = 3
};

enum flashrt_dtype {
    FLASHRT_DTYPE_UINT8 = 0,
    FLASHRT_DTYPE_INT32 = 1,
    FLASHRT_DTYPE_INT64 = 2,
    FLASHRT_DTYPE_FLOAT8_E4M3 = 3,
    FLASHRT_DTYPE_FLOAT16 = 4,
    FLASHRT_DTYPE_BFLOAT16 = 5,
    FLASHRT_DTYPE_FLOAT32 = 6
};

/* ---- The plan -------------------------------------------------------------------------------------------------- */

/* One named piece of memory: `rank` dimensions, row-major, without gaps. Rows are counted along shape[0]. */
typedef struct flashrt_buffer {
    const char *name;
    const void *device_address; /* on the contract's device */
    const void *host_address;   /* host memory of a SWAP window, else NULL. On a CPU the same as device_address; on a
                                   GPU pinned memory that may lag behind the device: read with flashrt_read */
    const uint64_t *shape;
    uint64_t nbytes;
    uint32_t rank;
    uint32_t dtype; /* enum flashrt_dtype */
    uint32_t role;  /* enum flashrt_role */
    uint32_t rate;  /* enum flashrt_rate: of the host that fills it, or of the stage that writes it */
    uint32_t filled_by_host; /* 1 for a window that flashrt_begin_fill lends, else 0 */
    uint32_t reserved;       /* 0 */
} flashrt_buffer;

/* One piece of work that is replayed as a whole. `reads` and `writes` are indices into `buffers`. */
typedef struct flashrt_stage {
    const char *name;
    const uint32_t *reads;
    const uint32_t *writes;
    uint32_t read_count;
    uint32_t write_count;
    uint32_t rate;     /* enum flashrt_rate */
    uint32_t reserved; /* 0 */
} flashrt_stage;

/* Bytes [offset, offset + nbytes) of a buffer, which capsules save. They are `blocks` equal blocks, each of `rows` rows
 * of `row_bytes` bytes; the first flashrt_live_rows rows of each block are live. */
typedef struct flashrt_region {
    const char *name;
    const char *live_extent; /* name of the row count that moves, or NULL: then the block is one row, always live */
    uint64_t offset;
    uint64_t nbytes;
    uint64_t blocks;
    uint64_t rows;
    uint64_t row_bytes;
    uint32_t buffer;   /* index into `buffers` */
    uint32_t reserved; /* 0 */
} flashrt_region;

/* A live contract. The callbacks take `context` first and write what they answer to `*status`, which the caller sets
 * to FLASHRT_INTERRUPTED before: if Python cannot even begin, that value stays. Call them through the inline functions
 * below, which do this and are documented there. */
typedef struct flashrt_contract {
    uint32_t abi_version; /* FLASHRT_ABI_VERSION of the host */
    uint32_t struct_size; /* bytes of this structure as the host fills it */
    const char *name;
    const char *fingerprint; /* SHA-256 over everything that decides what the bytes mean, 64 hexadecimal digits */
    uint32_t device_type;    /* enum flashrt_device */
    uint32_t device_index;   /* CUDA ordinal; 0 on a CPU */
    void *stream; /* cudaStream_t on which the callbacks put their work; NULL on a CPU, and for CUDA's default stream.
                     Kernels of your own that read a buffer belong there, after flashrt_act */
    const flashrt_buffer *buffers;
    const flashrt_stage *stages; /* in execution order */
    const flashrt_region *regions;
    uint32_t buffer_count;
    uint32_t stage_count;
    uint32_t region_count;
    uint32_t reserved; /* 0 */
    void *context;
    void (*begin_fill)(void *context, uint32_t buffer, void **address, flashrt_status *status);
    void (*filled)(void *context, uint32_t buffer, uint64_t rows, flashrt_status *status);
    void (*draw)(void *context, uint32_t buffer, flashrt_status *status);
    void (*act)(void *context, flashrt_status *status);
    void (*read)(void *context, uint32_t buffer, uint64_t offset, uint64_t nbytes, void *target, flashrt_status *status);
    void (*version_of)(void *context, uint32_t buffer, uint64_t *version, flashrt_status *status);
    void (*live_rows)(void *context, uint32_t region, uint64_t *rows, flashrt_status *status);
    void (*last_error)(void *context, char *text, uint64_t capacity, flashrt_status *status);
} flashrt_contract;

/* ---- Functions that need only the plan ------------------------------------------------------------------------- */

/* Whether the host speaks `abi_version` and fills every field that this header knows. Pass FLASHRT_ABI_VERSION, and use
 * nothing of a contract that was refused. */
static inline flashrt_status flashrt_contract_check(const flashrt_contract *contract, uint32_t abi_version)
{
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    if (contract->abi_version != abi_version || abi_version != FLASHRT_ABI_VERSION) return FLASHRT_WRONG_ABI;
    return contract->struct_size < sizeof(flashrt_contract) ? FLASHRT_TOO_SMALL : FLASHRT_OK;
}

/* Index of the buffer called `name`. */
static inline flashrt_status flashrt_find_buffer(const flashrt_contract *contract, const char *name, uint32_t *buffer)
{
    if (contract == NULL || name == NULL || buffer == NULL) return FLASHRT_BAD_ARGUMENT;
    for (uint32_t i = 0; i < contract->buffer_count; ++i) {
        if (strcmp(contract->buffers[i].name, name) != 0) continue;
        *buffer = i;
        return FLASHRT_OK;
    }
    return FLASHRT_UNKNOWN_BUFFER;
}

/* Index of the region called `name`. */
static inline flashrt_status flashrt_find_region(const flashrt_contract *contract, const char *name, uint32_t *region)
{
    if (contract == NULL || name == NULL || region == NULL) return FLASHRT_BAD_ARGUMENT;
    for (uint32_t i = 0; i < contract->region_count; ++i) {
        if (strcmp(contract->regions[i].name, name) != 0) continue;
        *region = i;
        return FLASHRT_OK;
    }
    return FLASHRT_UNKNOWN_REGION;
}

/* ---- Functions that ask the session ---------------------------------------------------------------------------- */

/* Lend the host memory of a window: `*address` is valid for writing until flashrt_filled. It waits until the upload of
 * the last content has left that memory. Until flashrt_filled nothing else can drive the session. */
static inline flashrt_status flashrt_begin_fill(const flashrt_contract *contract, uint32_t buffer, void **address)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->begin_fill(contract->context, buffer, address, &status);
    return status;
}

/* Give the window back with its first `rows` rows written: they go to the device and the version moves. The rows behind
 * them must not have been touched. After FLASHRT_DOES_NOT_FIT the window is still lent; call again. */
static inline flashrt_status flashrt_filled(const flashrt_contract *contract, uint32_t buffer, uint64_t rows)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->filled(contract->context, buffer, rows, &status);
    return status;
}

/* Fill a float32 window with N(0, 1) from the session's generator: the same numbers as if Python had drawn them. */
static inline flashrt_status flashrt_draw(const flashrt_contract *contract, uint32_t buffer)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->draw(contract->context, buffer, &status);
    return status;
}

/* Replay exactly the stale stages, in order. On a GPU they have been enqueued when this returns. */
static inline flashrt_status flashrt_act(const flashrt_contract *contract)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->act(contract->context, &status);
    return status;
}

/* Copy bytes [offset, offset + nbytes) of any buffer to host memory at `target`, as they are, and wait for them. */
static inline flashrt_status flashrt_read(const flashrt_contract *contract, uint32_t buffer, uint64_t offset,
                                          uint64_t nbytes, void *target)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->read(contract->context, buffer, offset, nbytes, target, &status);
    return status;
}

/* The version of a buffer: a counter that every write raises. */
static inline flashrt_status flashrt_version_of(const flashrt_contract *contract, uint32_t buffer, uint64_t *version)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->version_of(contract->context, buffer, version, &status);
    return status;
}

/* How many rows of each block of a region are live now, 0 to `rows`. */
static inline flashrt_status flashrt_live_rows(const flashrt_contract *contract, uint32_t region, uint64_t *rows)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->live_rows(contract->context, region, rows, &status);
    return status;
}

/* The sentence to the last refusal of a callback, as UTF-8, cut to `capacity` bytes with its final NUL. Empty if there
 * was none. It answers after a close too. */
static inline flashrt_status flashrt_last_error(const flashrt_contract *contract, char *text, uint64_t capacity)
{
    flashrt_status status = FLASHRT_INTERRUPTED;
    if (contract == NULL) return FLASHRT_BAD_ARGUMENT;
    contract->last_error(contract->context, text, capacity, &status);
    return status;
}

#ifdef __cplusplus
}
#endif

#endif /* FLASHRT_CONTRACT_H */
