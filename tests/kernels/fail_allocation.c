/* Loaded before the C library: an allocation that a range of code makes fails, by its number.
 *
 * `watch` names the range: the machine code of one shared library, so that the allocations of Python, NumPy and OpenMP
 * go on. `fail_at(n)` lets the n-th call from there fail (0: none) and counts from one again. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SLOTS = 1 << 16, NEAR = 16 };
static void *table[SLOTS + NEAR]; /* live allocations of the range, near the slot of their address */
static char *first, *end;
static long failing, calls, live;

void watch(char *from, char *to) { first = from, end = to; }
void fail_at(long n) { failing = n, calls = 0; }
long count_calls(void) { return calls; }
long count_live(void) { return live; }

#define IS_WATCHED ((char *)__builtin_return_address(0) >= first && (char *)__builtin_return_address(0) < end)

static int swap(void *memory, void *old, void *new) {
    void **slot = table + ((uintptr_t)memory >> 4) % SLOTS;
    for (int i = 0; i < NEAR; i++) {
        void *expected = old;
        if (__atomic_compare_exchange_n(slot + i, &expected, new, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return 1;
    }
    return 0;
}

static void forget(void *memory) {
    if (memory && swap(memory, memory, NULL)) __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
}

static void *remember(void *memory) {
    if (memory && swap(memory, NULL, memory)) __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
    return memory;
}

static int fails(void) { return __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == failing; }

void *malloc(size_t size) {
    if (!IS_WATCHED) return __libc_malloc(size);
    return fails() ? (errno = ENOMEM, NULL) : remember(__libc_malloc(size));
}

void *realloc(void *memory, size_t size) {
    if (!IS_WATCHED) return __libc_realloc(memory, size);
    if (fails()) return errno = ENOMEM, NULL;
    forget(memory);
    return remember(__libc_realloc(memory, size));
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
    const int watched = IS_WATCHED;
    if (watched && fails()) return ENOMEM;
    *memory = __libc_memalign(alignment, size);
    if (watched) remember(*memory);
    return *memory ? 0 : ENOMEM;
}

void free(void *memory) {
    forget(memory);
    __libc_free(memory);
}
