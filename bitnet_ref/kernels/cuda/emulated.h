// CUDA C++ on the host: the language's words, a block's threads and launches. The header of the device's functions takes
// this one in; it is included before a .cu file, and a C++17 compiler then builds that file unchanged.
//
// For reading, testing and debugging kernels where there is no GPU; nothing here is fast. One block runs after another.
// A block's threads are fibers of one host thread: each runs until it needs the others (__syncthreads, or a warp's
// shuffle, vote or mma) and then waits. So barriers and warp collectives mean what they mean on the device, and more
// errors are found than there:
//
//   - a barrier that some threads never reach, or that they reach on different lines, is an error that names the waiting
//     threads and lines; so is a warp collective whose lanes have different masks or operations, or whose lane has
//     exited, and a shuffle from a lane that takes no part;
//   - the order in which threads run is a parameter of the launch (ascending, descending, or shuffled by a seed): a
//     result that depends on it lacks a barrier;
//   - shared memory holds 0xCD when a block starts (except in function templates: GCC keeps it out of the filled
//     section), so a value read before it is written shows; a write past dynamic shared memory is an error;
//   - built with -fsanitize=address, every out-of-bounds access of shared, local and global memory is found.
//
// What it does not model: caches, memory ordering between blocks, alignment faults, occupancy, time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#define BITNET_REF_EMULATED 1

#if defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

// -- the language's extra words ---------------------------------------------------------------------------------------

#ifndef BITNET_REF_LISTING  // the pass that lists a file's kernels looks for this word
#define __global__
#endif
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __attribute__((section("emulated_shared")))
#endif

// -- vector types -----------------------------------------------------------------------------------------------------

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 { unsigned x, y, z; };

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

// -- the block's threads, as fibers -----------------------------------------------------------------------------------

// From one stack to another: by hand where it has been written, else by ucontext, whose calls into the system make it
// some ten times slower. (BITNET_REF_UCONTEXT chooses that too.)
#if defined(__linux__) && defined(__x86_64__) && !defined(BITNET_REF_UCONTEXT)
#define BITNET_REF_OWN_SWITCH
using EmulatedContext = void *;
extern "C" void emulated_switch(EmulatedContext *save, EmulatedContext load);
asm(R"(
    .text
    .local emulated_switch
    .type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size emulated_switch, . - emulated_switch
)");
#else
#include <ucontext.h>
using EmulatedContext = ucontext_t;
static void emulated_switch(EmulatedContext *save, EmulatedContext &load) { swapcontext(save, &load); }
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void **, const void *, size_t) {}
static void __sanitizer_finish_switch_fiber(void *, const void **, size_t *) {}
extern "C" char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
#endif

namespace emulated {

constexpr int POISON = 0xCD;
constexpr size_t GUARD_BYTES = 256;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif

enum class State { ready, at_barrier, at_collective, exited };

struct Warp;
using Finish = void (*)(Warp &, unsigned mask);  // computes a collective for all lanes of the mask at once

struct Fiber {
    State state;
    uint3 index;
    unsigned number;  // in the block
    const char *barrier_file;
    int barrier_line, barrier_value;
    Finish finish;    // what it waits for in its warp
    const char *operation;
    unsigned mask;
    void *payload;    // its part of that collective
    char *stack;
    EmulatedContext context;
    void *fake_stack;  // the sanitizer's
};

struct Progress { unsigned waiting, exited; };  // of a warp, a bit for each lane

struct Warp {
    Fiber *lanes;
    Progress &progress;
    unsigned count;  // of lanes: 32, or what the last warp of a block has
    template <typename T> T &payload(unsigned lane) { return *static_cast<T *>(lanes[lane].payload); }
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Progress> progress;  // of each warp
    std::vector<unsigned> order;
    Fiber *current = nullptr;
    void (*body)(void **) = nullptr;
    void **arguments = nullptr;
    char *dynamic = nullptr;
    size_t dynamic_bytes = 0;
    int barrier_count = 0;  // threads that gave the last barrier a true value
    bool failed = false;
    char error[1024] = "";
    EmulatedContext context;
    void *fake_stack = nullptr;
    const void *host_stack = nullptr;
    size_t host_stack_bytes = 0;
};
static Machine machine;

static void to_scheduler(bool for_ever = false) {
    Fiber *self = machine.current;
    void **fake_stack = for_ever ? nullptr : &self->fake_stack;
    __sanitizer_start_switch_fiber(fake_stack, machine.host_stack, machine.host_stack_bytes);
    emulated_switch(&self->context, machine.context);
    __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}

static void to_fiber(Fiber &fiber) {
    machine.current = &fiber;
    threadIdx = fiber.index;
    __sanitizer_start_switch_fiber(&machine.fake_stack, fiber.stack, STACK_BYTES);
    emulated_switch(&machine.context, fiber.context);
    __sanitizer_finish_switch_fiber(machine.fake_stack, nullptr, nullptr);
}

/* Ends the launch with this error message; no thread goes on. */
__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...) {
    if (!machine.failed) {
        machine.failed = true;
        const uint3 b = blockIdx;
        int used = snprintf(machine.error, sizeof machine.error, "block (%u, %u, %u): ", b.x, b.y, b.z);
        va_list values;
        va_start(values, format);
        vsnprintf(machine.error + used, sizeof machine.error - used, format, values);
        va_end(values);
    }
}

struct Launch {
    unsigned grid[3], block[3];
    unsigned dynamic_bytes;
    unsigned order;  // 0: threads and blocks ascend; 1: descend; else shuffled by this seed
};

[[noreturn]] static void die() {
    for (;;) to_scheduler(true);
}

static void fiber_main() {
    const void *bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (machine.host_stack == nullptr) machine.host_stack = bottom, machine.host_stack_bytes = size;
    machine.body(machine.arguments);
    Fiber &self = *machine.current;
    self.state = State::exited;
    machine.progress[self.number / 32].exited |= 1u << self.number % 32;
    die();
}

static void start(Fiber &fiber) {
    fiber.state = State::ready;
    fiber.fake_stack = nullptr;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);  // what an unfinished run has left
#endif
#ifdef BITNET_REF_OWN_SWITCH
    const size_t apart = fiber.number % 64 * 192;  // or all tops would fall into the same sets of the host's cache
    auto top = reinterpret_cast<void **>(fiber.stack + STACK_BYTES - apart);  // 16-byte aligned, as a call leaves it
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(&fiber_main);  // where emulated_switch returns to
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.context = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
#endif
}

// -- warp collectives -------------------------------------------------------------------------------------------------

static Warp warp_of(unsigned number) {
    const unsigned first = number / 32 * 32;
    const unsigned count = std::min<unsigned>(32, machine.fibers.size() - first);
    return {&machine.fibers[first], machine.progress[first / 32], count};
}

/* Completes the collective that lane `lane` waits for, if every lane of its mask that has not exited has come. */
static bool complete(Warp warp, unsigned lane) {
    const Fiber &self = warp.lanes[lane];
    const unsigned named = self.mask & (warp.count == 32 ? ~0u : (1u << warp.count) - 1);
    const unsigned here = named & warp.progress.waiting;
    if ((named & ~warp.progress.exited) != here) return false;
    for (unsigned other = 0; other < warp.count; other++) {
        const Fiber &fiber = warp.lanes[other];
        if (here >> other & 1 && (fiber.finish != self.finish || fiber.mask != self.mask)) {
            fail("lanes %u and %u of the warp of thread %u meet in different collectives: %s with mask 0x%08x and %s "
                 "with mask 0x%08x",
                 lane, other, self.number, self.operation, self.mask, fiber.operation, fiber.mask);
            return false;
        }
    }
    self.finish(warp, here);
    warp.progress.waiting &= ~here;
    for (unsigned other = 0; other < warp.count; other++)
        if (here >> other & 1) warp.lanes[other].state = State::ready;
    return true;
}

/* One lane's arrival; returns when all have come and `finish` has filled in their payloads. */
static void collective(const char *operation, unsigned mask, Finish finish, void *payload) {
    Fiber &self = *machine.current;
    const unsigned lane = self.number % 32;
    if (!(mask >> lane & 1)) {
        fail("thread %u: %s with mask 0x%08x, which lacks its own lane %u", self.number, operation, mask, lane);
        die();
    }
    self.state = State::at_collective;
    self.operation = operation, self.mask = mask, self.finish = finish, self.payload = payload;
    const Warp warp = warp_of(self.number);
    warp.progress.waiting |= 1u << lane;
    complete(warp, lane);
    if (machine.failed) die();
    if (self.state != State::ready) to_scheduler();
}

// -- barriers of the block --------------------------------------------------------------------------------------------

static int barrier(const char *file, int line, int value) {
    Fiber &self = *machine.current;
    self.state = State::at_barrier;
    self.barrier_file = file, self.barrier_line = line, self.barrier_value = value;
    to_scheduler();
    return machine.barrier_count;
}

static void describe_deadlock() {
    char text[700];
    int used = 0, shown = 0;
    size_t exited = 0;
    for (const Fiber &fiber : machine.fibers) {
        exited += fiber.state == State::exited;
        const bool like_the_last = &fiber != &machine.fibers[0] && fiber.state == (&fiber - 1)->state &&
                                   fiber.barrier_line == (&fiber - 1)->barrier_line;
        if (fiber.state == State::exited || like_the_last || ++shown > 6) continue;
        if (fiber.state == State::at_barrier)
            used += snprintf(text + used, sizeof text - used, "; thread %u waits in __syncthreads at line %d of %.40s",
                             fiber.number, fiber.barrier_line, fiber.barrier_file);
        else
            used += snprintf(text + used, sizeof text - used, "; thread %u waits in %s with mask 0x%08x", fiber.number,
                             fiber.operation, fiber.mask);
    }
    text[used] = 0;
    fail("no thread can go on: %zu of %zu have exited%s", exited, machine.fibers.size(), text);
}

/* Called when no thread is ready: opens a barrier that all have reached, or completes collectives of exited lanes. */
static bool release() {
    bool any = false;
    for (Fiber &fiber : machine.fibers)
        if (fiber.state == State::at_collective) any |= complete(warp_of(fiber.number), fiber.number % 32);
    if (any || machine.failed) return any;
    const Fiber &first = machine.fibers[0];
    machine.barrier_count = 0;
    for (const Fiber &fiber : machine.fibers) {
        if (fiber.state != State::at_barrier || fiber.barrier_line != first.barrier_line ||
            strcmp(fiber.barrier_file, first.barrier_file) != 0)
            return false;
        machine.barrier_count += fiber.barrier_value != 0;
    }
    for (Fiber &fiber : machine.fibers) fiber.state = State::ready;
    return true;
}

static void run_block() {
    char *dynamic = machine.dynamic;
#ifndef __SANITIZE_ADDRESS__
    if (__start_emulated_shared != nullptr)
        memset(__start_emulated_shared, POISON, __stop_emulated_shared - __start_emulated_shared);
    memset(dynamic + machine.dynamic_bytes, ~POISON, GUARD_BYTES);
#endif
    if (machine.dynamic_bytes != 0) memset(dynamic, POISON, machine.dynamic_bytes);
    machine.progress.assign((machine.fibers.size() + 31) / 32, {0, 0});
    for (Fiber &fiber : machine.fibers) start(fiber);
    for (;;) {
        bool ran = false;
        for (unsigned number : machine.order) {
            Fiber &fiber = machine.fibers[number];
            if (fiber.state != State::ready) continue;
            ran = true;
            to_fiber(fiber);
            if (machine.failed) return;
        }
        if (ran || release()) continue;
        bool all = true;
        for (const Fiber &fiber : machine.fibers) all &= fiber.state == State::exited;
        if (!all && !machine.failed) describe_deadlock();
        break;
    }
#ifndef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (dynamic[machine.dynamic_bytes + i] != char(~POISON)) {
            fail("a write past the %zu bytes of dynamic shared memory, at byte %zu", machine.dynamic_bytes,
                 machine.dynamic_bytes + i);
            return;
        }
#endif
}

// -- launching --------------------------------------------------------------------------------------------------------

static const char *launch(const Launch &sizes, void (*body)(void **), void **arguments) {
    const unsigned threads = sizes.block[0] * sizes.block[1] * sizes.block[2];
    const unsigned blocks = sizes.grid[0] * sizes.grid[1] * sizes.grid[2];
    machine.failed = false;
    machine.body = body, machine.arguments = arguments;
    machine.host_stack = nullptr;
    blockDim = dim3(sizes.block[0], sizes.block[1], sizes.block[2]);
    gridDim = dim3(sizes.grid[0], sizes.grid[1], sizes.grid[2]);
    for (unsigned i = machine.fibers.size(); i > threads; i--) free(machine.fibers[i - 1].stack);
    const unsigned had = std::min<unsigned>(machine.fibers.size(), threads);
    machine.fibers.resize(threads);
    machine.order.resize(threads);
    for (unsigned i = had; i < threads; i++)
        machine.fibers[i].stack = static_cast<char *>(aligned_alloc(64, STACK_BYTES));
    for (unsigned i = 0; i < threads; i++) {
        machine.fibers[i].number = i;
        machine.fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        machine.order[i] = sizes.order == 1 ? threads - 1 - i : i;
    }
    std::mt19937 dice(sizes.order);
    machine.dynamic_bytes = sizes.dynamic_bytes;
#ifdef __SANITIZE_ADDRESS__  // nothing behind it: the sanitizer's own zone begins there (malloc aligns to 16 bytes)
    machine.dynamic = sizes.dynamic_bytes ? static_cast<char *>(malloc(sizes.dynamic_bytes)) : nullptr;
#else
    machine.dynamic = static_cast<char *>(aligned_alloc(1024, (sizes.dynamic_bytes + GUARD_BYTES + 1023) / 1024 * 1024));
#endif
    for (unsigned i = 0; i < blocks && !machine.failed; i++) {
        if (sizes.order > 1) std::shuffle(machine.order.begin(), machine.order.end(), dice);
        const unsigned block = sizes.order == 1 ? blocks - 1 - i : i;
        blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / (gridDim.x * gridDim.y)};
        run_block();
    }
    free(machine.dynamic);
    return machine.failed ? machine.error : nullptr;
}

template <typename T> constexpr char kind() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, float>) return 'f';
    if (std::is_same_v<T, double>) return 'd';
    if (std::is_integral_v<T>) return sizeof(T) == 8 ? 'l' : sizeof(T) == 4 ? 'i' : sizeof(T) == 2 ? 'h' : 'b';
    return '?';
}

template <auto kernel> struct Kernel;
template <typename... Arguments, void (*kernel)(Arguments...)> struct Kernel<kernel> {
    template <size_t... I> static void call(void **values, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<Arguments> *>(values[I])...);
    }
    static void body(void **values) { call(values, std::index_sequence_for<Arguments...>()); }
    static const char *kinds() {
        static const char text[] = {kind<Arguments>()..., 0};
        return text;
    }
};

}  // namespace emulated

/* Gives a kernel its two entry points: its parameters' kinds, and a launch (null, or what went wrong). */
#define EMULATED_EXPORT extern "C" __attribute__((visibility("default"))) const char *
#define EMULATED_KERNEL(name)                                                                                         \
    EMULATED_EXPORT emulated_kinds_##name() { return emulated::Kernel<&name>::kinds(); }                              \
    EMULATED_EXPORT emulated_launch_##name(const emulated::Launch *sizes, void **arguments) {                         \
        return emulated::launch(*sizes, &emulated::Kernel<&name>::body, arguments);                                   \
    }

#define __syncthreads() ((void)emulated::barrier(__FILE__, __LINE__, 0))
#define __syncthreads_or(value) (emulated::barrier(__FILE__, __LINE__, (value) != 0) != 0)

static inline void *emulated_dynamic_shared() { return emulated::machine.dynamic; }
