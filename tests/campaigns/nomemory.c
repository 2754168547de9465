/* Lets one allocation of Python's own fail.

   nomemory_arm(n, other): from now on count the allocations of this thread, or with `other` those of all other threads,
   and let the n-th fail; n = 0 only counts. nomemory_disarm() -> the allocations counted. The hooks stay, so that no
   thread meets an allocator that is half exchanged. With `trace` set the C stack of the failing call goes to stderr. */
#include <Python.h>
#include <execinfo.h>
#include <pthread.h>

static PyMemAllocatorEx below[3];
static pthread_t arming;
static long calls, wanted;
static int armed, others, hooked;
int nomemory_trace;

static int fails(void) {
    if (!armed || !pthread_equal(arming, pthread_self()) != others) return 0;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != wanted) return 0;
    void *frames[60];
    if (nomemory_trace) backtrace_symbols_fd(frames, backtrace(frames, 60), 2);
    return 1;
}

static void *fail_malloc(void *to, size_t size) {
    PyMemAllocatorEx *real = to;
    return fails() ? NULL : real->malloc(real->ctx, size);
}
static void *fail_calloc(void *to, size_t count, size_t size) {
    PyMemAllocatorEx *real = to;
    return fails() ? NULL : real->calloc(real->ctx, count, size);
}
static void *fail_realloc(void *to, void *block, size_t size) {
    PyMemAllocatorEx *real = to;
    return fails() ? NULL : real->realloc(real->ctx, block, size);
}
static void pass_free(void *to, void *block) {
    PyMemAllocatorEx *real = to;
    real->free(real->ctx, block);
}

void nomemory_arm(long n, int other) {
    PyMemAllocatorDomain domains[3] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
    for (int i = 0; i < 3 && !hooked; i++) {
        PyMem_GetAllocator(domains[i], &below[i]);
        PyMemAllocatorEx hook = {&below[i], fail_malloc, fail_calloc, fail_realloc, pass_free};
        PyMem_SetAllocator(domains[i], &hook);
    }
    hooked = 1, calls = 0, wanted = n, others = other, arming = pthread_self();
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

long nomemory_disarm(void) {
    armed = 0;
    return calls;
}
